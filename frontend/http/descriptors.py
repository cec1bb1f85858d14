"""File descriptors: which of them connections leave to everything else.

A connection is one descriptor. Each HTTP listener has eight connections for certain, so that a
flood at one does not lock the operator out of another. grpc accepts connections up to its share, a
quarter of all descriptors, without regard to those in use. Further HTTP connections therefore leave
these free, and some for workers, archives and logs.
"""

import resource
from contextlib import suppress

#: Connections that each listener of HTTP may always have.
CERTAIN_CONNECTIONS = 8
# For workers, archives and logs; less where there are few, as each share below.
_SPARE = 64
_MAX_DESCRIPTORS = 1 << 20


def grpc_descriptors() -> int:
    """Return the number of connections that all gRPC listeners may have; 0 for any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else soft // 4


def is_reserved(descriptor: int, listeners: int, *, has_grpc: bool) -> bool:
    """Return whether the descriptor of a connection is one of those left to everything else.

    The system gives out the lowest free number, so the number of a new descriptor is about that of
    those in use. The limit may be changed from outside while the server runs.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return False
    reserve = min(_SPARE, soft // 4) + CERTAIN_CONNECTIONS * listeners
    if has_grpc:
        reserve += grpc_descriptors()
    return descriptor >= soft - reserve


def raise_descriptor_limit() -> None:
    """Take as many file descriptors as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
