"""Where the command line begins: the installed scripts, and ``python -m marserve``.

Every worker imports the file its server was started from, under another name: that is how
multiprocessing makes sure that what it unpickles exists. So nothing is imported here before it is
needed; the command line's imports would be 40 ms of every start of a worker, and memory for good.
"""

import sys


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    from marserve.frontend.cli import main as run

    return run(program="torchserve" if sys.argv[0].endswith("torchserve") else "marserve")


# The guard matters: a worker runs this file again under another name.
if __name__ == "__main__":
    sys.exit(main())
