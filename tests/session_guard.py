"""Kills the processes of a test session whose process has ended, as after SIGKILL.

The session has the other end of standard input, and passes the mark of its processes.
"""

import sys

from marserve.frontend.lifecycle.started_processes import StartedProcesses

sys.stdin.read()
StartedProcesses().kill(sys.argv[1])
