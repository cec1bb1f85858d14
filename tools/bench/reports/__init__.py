"""The reports of ``marserve bench``: a table, CSV, JSON and an HTML page."""
