import os

import pytest

from marserve.frontend.regular_files import NoFile, open_file, read_file

pytestmark = pytest.mark.timeout(20)  # a pipe would be waited for


@pytest.fixture(params=["pipe", "device", "directory"])
def other(request, tmp_path):
    """What is at the path of a file and is none."""
    path = tmp_path / request.param
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def test_what_is_no_file_is_not_read(other):
    with pytest.raises(NoFile, match="is no file"):
        read_file(other)


def test_a_link_is_followed_if_it_may(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    link = tmp_path / "link"
    link.symlink_to("file")
    assert read_file(link) == b"text"
    with pytest.raises(OSError, match="symbolic links"):
        open_file(link, follow=False)


def test_a_long_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_file(tmp_path / "file", 4)
