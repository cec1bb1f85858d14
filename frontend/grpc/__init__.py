"""gRPC: what the server offers over it, and how calls become what the rest of the server knows.

grpc prepares for forks of its process, by handlers that run between fork and exec, too. With uvloop
that is how processes are started, and every tenth or so that was started during a call died of it
(SIGSEGV; grpcio 1.85, uvloop 0.23). No child goes on using this process's grpc, so they are off.
grpc reads the variable when it is imported. It is put back at once: workers inherit the
environment, and their handlers may use grpc in their own way.
"""

import os

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

_given = os.environ.get(_FORK_SUPPORT)
os.environ[_FORK_SUPPORT] = "0"
try:
    import grpc  # noqa: F401  # for its sake all this
finally:
    if _given is None:
        del os.environ[_FORK_SUPPORT]
    else:
        os.environ[_FORK_SUPPORT] = _given
