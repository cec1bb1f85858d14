"""Requests that fail do not fail those that share a batch with them."""
