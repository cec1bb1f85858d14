"""The version, under TorchServe's name."""

from importlib.metadata import version

__version__ = version("marserve")
