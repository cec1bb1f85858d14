"""The gRPC services of the server."""

import os

# Otherwise grpc acts whenever the server starts a process: about every second time that broke the
# new process's pipe, and each time it wrote a line. No child of the server uses this grpc.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
