"""The Python API of marserve's workflow archiver under TorchServe's import name.

The finder that serves it comes with ``ts``; this package only exists to be found first, and makes
room for the alias.
"""

import importlib
import sys

import ts  # noqa: F401 - installs the finder

del sys.modules[__name__]
importlib.import_module(__name__)
