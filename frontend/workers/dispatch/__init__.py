"""How a worker that is READY is given its batches: one strategy per file."""
