"""The start of a worker's processes.

* ``bootstrap``   the entry point of an interpreter that was started by a command line
* ``fork_server`` the process that forks workers
* ``runner``      the process of torchrun, which starts the processes of one worker
* ``ranks``       the connections of these processes
"""
