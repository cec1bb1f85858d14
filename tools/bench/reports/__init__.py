"""What ``marserve bench`` tells of its measurements: a table, CSV, JSON, one HTML page."""
