"""One sharded model in all it does: held, run, trained."""
