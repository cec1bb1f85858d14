"""How the process of a worker begins."""
