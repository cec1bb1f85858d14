"""Who is served: archives, settings, the registry and its one writer."""
