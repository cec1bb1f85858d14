"""The waiting room: jobs, their queue, and when a batch leaves."""
