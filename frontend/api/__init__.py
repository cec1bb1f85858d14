"""The doors: the routes of each listener, requests in, responses out."""
