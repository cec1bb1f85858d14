"""``python -m marserve``: the only file of the namespace `marserve` itself.

Like the file it stands for, it is imported again by every worker, so nothing else may be.
"""

import sys

from marserve.frontend.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
