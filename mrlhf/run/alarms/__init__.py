"""Alarms: what goes wrong in a run, seen in its metrics, with the cause and the key to change."""
