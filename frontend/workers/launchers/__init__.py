"""Starts the processes of workers, stops them, and finds out how they ended.

``launcher`` is the interface for the rest of the server. Another way to start workers (Ray, another
machine) is another implementation of it in its own file, beside ``local``, which starts processes
on this machine and chooses between ``fork_server`` and ``command``.
"""
