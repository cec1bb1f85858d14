"""Batches that are run before the traffic comes: to warm a model up, and to learn their costs."""
