"""What outlives a process: the state of a run in files, and how it comes back."""
