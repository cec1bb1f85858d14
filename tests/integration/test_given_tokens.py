"""Keys that an operator gives, as Kubernetes mounts a Secret."""

import pytest
from servers import PATIENCE, Server

pytestmark = pytest.mark.integration


@pytest.fixture
def secret(tmp_path):
    """A Secret as it is mounted: links into a directory that is swapped when it changes."""
    version = tmp_path / "..2026"
    version.mkdir()
    (tmp_path / "..data").symlink_to(version.name)
    for kind in ("inference", "management"):
        (version / kind).write_text(f"the-key-for-{kind}")
        (tmp_path / kind).symlink_to(f"..data/{kind}")
    return tmp_path


def statuses(server: Server, kind: str) -> tuple[int, ...]:
    headers = {"Authorization": f"Bearer the-key-for-{kind}"}
    asked = (
        server.inference("GET", "/ping", headers=headers),
        server.management("GET", "/models", headers=headers),
    )
    return tuple(answer.status_code for answer in asked)


def test_several_servers_can_have_the_same_keys(start_server, secret):
    with start_server(token_directory=str(secret)) as server:
        assert statuses(server, "inference") == (200, 400)
        assert statuses(server, "management") == (400, 200)
        assert server.inference("GET", "/ready").status_code == 200
        assert not (server.directory / "key_file.json").exists()
        renewal = server.management("GET", "/token?type=inference")
        assert (renewal.status_code, "token_directory" in renewal.text) == (400, True)
        server.wait_printed("Token authorization is on: token_directory=")


def test_it_does_not_start_without_them(prepare_server, secret):
    (secret / "management").unlink()
    with prepare_server(token_directory=str(secret)) as server:
        assert server.launch().wait(PATIENCE) == 1
        server.wait_printed("token_directory")
