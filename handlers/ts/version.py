"""The version, where TorchServe's users look for it."""

from importlib.metadata import version

__version__ = version("marserve")
