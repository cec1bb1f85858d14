"""The model catalog: which models several servers are to serve, and how each brings that about."""
