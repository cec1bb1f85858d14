"""HTTP/1.1 as a transport: listeners, connections, routing, requests, responses; no routes."""
