"""The control groups of this process, which limit it in a container."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, MOUNTS = Path("/proc"), Path("/sys/fs/cgroup")


def nested_groups(
    controller: str, proc: Path = PROC, mounts: Path = MOUNTS
) -> Iterator[tuple[int, Path]]:
    """Yield the control group of this process and each group around it, with their version.

    ``controller`` is a name of version 1, as ``memory``. Directories may be missing: in a container
    the group may have the host's name, and be mounted at the top, which is always among them.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        group = PurePosixPath(name.lstrip("/"))
        if ".." in group.parts:  # outside our namespace
            group = PurePosixPath()
        if rest and not controllers:
            roots, version = [mounts], 2
        elif controller in controllers.split(","):
            # Controllers may be mounted together, and the link with a single name may be missing.
            roots, version = list(dict.fromkeys([mounts / controller, mounts / controllers])), 1
        else:
            continue
        for root in roots:
            for each in (group, *group.parents):
                yield version, root / each
