"""Helpers for asyncio without domain knowledge: background tasks, threads, work in slices."""
