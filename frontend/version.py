"""The version of this distribution."""

from importlib.metadata import version

__version__ = version("marserve")
