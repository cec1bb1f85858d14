"""Transport-independent requests: predictions, and the management of models."""
