"""Starts the processes of workers, stops them, and finds out how they ended."""
