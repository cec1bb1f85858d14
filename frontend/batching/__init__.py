"""Jobs, their queue, and the batches that are formed from them."""
