"""Environments and tools that users write, and the processes in which they run."""
