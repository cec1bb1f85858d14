"""Workers: their processes, the connections to them, their batches, and who looks after them."""
