import errno
import os
import stat

import pytest

from marserve.frontend.atomic_file import replace_file


def test_a_private_file_needs_no_change_of_its_mode(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "this file system has no modes")

    monkeypatch.setattr(os, "fchmod", refuse)
    replace_file(tmp_path / "keys", b"secret")
    assert (tmp_path / "keys").read_bytes() == b"secret"
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    with pytest.raises(PermissionError):
        replace_file(tmp_path / "keys", b"other", mode=0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["keys"]
    assert (tmp_path / "keys").read_bytes() == b"secret"
