"""How the processes of a worker begin.

* ``bootstrap``   the entry of an interpreter that was started by a command line
* ``fork_server`` the process that forks workers
* ``runner``      the process of torchrun, which starts those of one worker and gives them sockets
* ``ranks``       how a batch gets to all of them
"""
