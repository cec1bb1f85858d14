"""Batches of inputs of about one length."""
