"""Metrics, their page and their log, and the access log."""
