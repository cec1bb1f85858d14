"""HTTP/1.1 as a transport: listeners, connections, routing, requests and responses; no model."""
