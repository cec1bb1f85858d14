"""The dispatch of batches to a worker that is READY: one strategy in each file."""
