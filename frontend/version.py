"""The versions of this distribution and of the TorchServe that it is compatible with."""

from importlib.metadata import version

__version__ = version("marserve")

#: For programs that select requests, archives and settings by it.
TORCHSERVE_VERSION = "0.12.0"
