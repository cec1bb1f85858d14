"""Failing requests do not fail the others of their batch."""
