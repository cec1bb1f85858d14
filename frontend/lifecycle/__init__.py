"""The server as a process: how it is started, watched and ended, and how its files are removed."""
