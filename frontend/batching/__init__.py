"""Jobs, their queue, and the batches that are made of them."""
