"""The far end of the wire: processes, connections, and who looks after them."""
