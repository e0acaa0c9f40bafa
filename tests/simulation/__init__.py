"""Runs the start and one step of a rank of a job of any size, on tensors without values."""
