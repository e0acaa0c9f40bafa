"""Processes for users' code: their life, seen from the trainer and from inside."""
