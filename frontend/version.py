"""The version of this distribution, and of the TorchServe whose contract it keeps."""

from importlib.metadata import version

__version__ = version("marserve")

#: For those who ask which requests, archives and settings are understood.
TORCHSERVE_VERSION = "0.12.0"
