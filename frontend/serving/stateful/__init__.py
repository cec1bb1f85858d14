"""Stateful models, whose requests belong to sequences: the same interface as other models have."""
