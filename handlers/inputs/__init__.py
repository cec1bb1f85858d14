"""Preparation of requests: images, words, and threads that prepare several at a time."""
