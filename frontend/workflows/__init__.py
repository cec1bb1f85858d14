"""Workflows: graphs of models and functions that are asked for one answer."""
