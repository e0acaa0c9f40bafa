"""Looks over a machine, its links, a model and a run's data, and says what to do about each."""
