"""The gRPC transport: listeners, calls and services.

The core of grpc reads two environment variables when it is imported:

* ``GRPC_ENABLE_FORK_SUPPORT``: its fork handlers run between fork and exec, too. uvloop starts
  processes that way, and about one in ten that started during a call died (SIGSEGV; grpcio 1.85,
  uvloop 0.23). No child process uses this process's grpc, so fork support is disabled.
* ``GRPC_VERBOSITY``: it prints a line for each failed TLS handshake, so that a client could fill
  the console. So it prints nothing, unless the variable is set.

Both are restored after the import: workers inherit the environment, and their handlers may use
grpc.
"""

import os

_VARIABLES = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
}

_given = {name: os.environ.get(name) for name in _VARIABLES}
os.environ.update(_VARIABLES)
try:
    import grpc  # noqa: F401  # reads the variables
finally:
    for _name, _value in _given.items():
        if _value is None:
            del os.environ[_name]
        else:
            os.environ[_name] = _value
