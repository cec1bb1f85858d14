"""Logs: their files, formats and levels, and what an operator says of them."""
