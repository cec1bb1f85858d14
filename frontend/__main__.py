"""Where the command line begins: the installed scripts, and ``python -m marserve``.

Nothing is imported here before it is needed: the standard descriptors are filled first.
"""

import os
import sys

_STANDARD_ERROR = 2


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    _fill_standard_descriptors()
    if os.getpid() == 1:  # of a container, which is to end with the server, detached or not
        from marserve.frontend.lifecycle.container_init import supervise

        return supervise([sys.executable, *sys.orig_argv[1:]])
    from marserve.frontend.cli import main as run

    return run(program="torchserve" if sys.argv[0].endswith("torchserve") else "marserve")


def _fill_standard_descriptors() -> None:
    """Open those that are closed on /dev/null, as after ``>&-``.

    Else the next file that is opened is standard output, and what is printed is written into it.
    """
    while (lowest_free := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(lowest_free, True)
    os.close(lowest_free)


# The guard matters: a worker runs this file again under another name.
if __name__ == "__main__":
    sys.exit(main())
