"""What happened to each request and each worker, and when."""
