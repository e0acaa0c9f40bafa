"""The state of a run in files, and how it comes back."""
