"""What a request passes: registry, model versions, admission and the pool of workers."""
