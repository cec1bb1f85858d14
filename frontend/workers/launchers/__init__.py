"""How the process of a worker begins, ends, and what is known of it afterwards.

``launcher`` is what the rest of the server sees: the two protocols. Another way to start workers
(Ray, another machine) is another implementation of them in a file of its own, beside ``local``,
which starts processes on this machine and chooses between ``fork_server`` and ``command``.
"""
