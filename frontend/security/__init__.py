"""Keys, guarded routes, and the limits of what clients may use."""
