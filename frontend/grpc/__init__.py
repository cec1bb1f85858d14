"""gRPC: what the server offers over it, and how calls become what the rest of the server knows.

grpc's core reads two variables of the environment when it is imported:

* It prepares for forks of its process, by handlers that run between fork and exec, too. With uvloop
  that is how processes are started, and every tenth or so that was started during a call died of it
  (SIGSEGV; grpcio 1.85, uvloop 0.23). No child goes on using this process's grpc, so they are off.
* It prints a line for each TLS handshake that fails, so that any client could fill the console. So
  it prints nothing, unless ``GRPC_VERBOSITY`` is set.

They are put back at once: workers inherit the environment, and their handlers may use grpc in their
own way.
"""

import os

_VARIABLES = {
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
}

_given = {name: os.environ.get(name) for name in _VARIABLES}
os.environ.update(_VARIABLES)
try:
    import grpc  # noqa: F401  # for its sake all this
finally:
    for _name, _value in _given.items():
        if _value is None:
            del os.environ[_name]
        else:
            os.environ[_name] = _value
