"""``python -m marserve.frontend``: the command line without an installed script."""

import sys

from marserve.frontend.cli import main

# The guard matters: a spawned worker runs this file again under another name.
if __name__ == "__main__":
    sys.exit(main())
