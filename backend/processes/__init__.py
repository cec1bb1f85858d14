"""How the processes of a worker begin, where the frontend does not fork them: commands, and ranks.

* ``bootstrap``   the entry of an interpreter that was started by a command line
* ``preloading``  what the fork server imports before it forks
* ``runner``      the process of torchrun, which starts those of one worker and gives them sockets
* ``ranks``       how a batch gets to all of them
"""
