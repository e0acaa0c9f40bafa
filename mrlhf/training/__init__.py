"""Holds, runs and trains one sharded model."""
