"""Replaces a file, so that readers never see an incomplete one."""

import errno
import os
import tempfile
from pathlib import Path

# The mode of temporary files: only the owner may read them.
_CREATED = 0o600


def replace_file(path: Path, content: bytes, mode: int = _CREATED, *, durable: bool = True) -> None:
    """Write a file in one step; with ``durable`` also if the power fails.

    A process that is killed meanwhile may leave ``.NAME.RANDOM.new`` beside it.
    """
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", suffix=".new", delete=False
    ) as file:
        new = Path(file.name)
        try:
            if mode != _CREATED:  # else it need not be possible: some file systems refuse it
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            new.replace(path)
        except BaseException:  # the disk may be full
            new.unlink(missing_ok=True)
            raise
    if durable:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of file systems that cannot do it
                raise
        finally:
            os.close(descriptor)
