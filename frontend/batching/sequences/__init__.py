"""Sequences: requests of a stateful model that go to one worker, in order."""
