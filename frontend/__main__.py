"""The entry point of the installed scripts and of ``python -m marserve``.

Other modules are imported after the standard descriptors are open.
"""

import os
import sys

_STANDARD_ERROR = 2


def main() -> int:
    """Run the command line of this process; return its exit code."""
    _fill_standard_descriptors()
    if os.getpid() == 1:  # of a container, which ends with the server, detached or not
        from marserve.frontend.lifecycle.container_init import supervise

        return supervise([sys.executable, *sys.orig_argv[1:]])
    from marserve.frontend.cli import main as run

    return run(program="torchserve" if sys.argv[0].endswith("torchserve") else "marserve")


def _fill_standard_descriptors() -> None:
    """Open closed descriptors (``>&-``) on /dev/null, and the streams that Python has not made.

    Otherwise the next opened file becomes standard output, and prints are written into it.
    """
    while (lowest_free := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(lowest_free, True)
    os.close(lowest_free)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


# multiprocessing imports this file in workers under another name.
if __name__ == "__main__":
    sys.exit(main())
