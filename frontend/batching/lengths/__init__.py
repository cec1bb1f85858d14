"""Batches of inputs of similar lengths, so that little of them is padding."""
