import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from marserve.frontend.errors import InvalidToken
from marserve.frontend.security.tokens import Kind, TokenStore

KINDS: list[Kind] = ["inference", "management"]
START = 1_795_210_631.933333
LIFETIME = 60.0


class Clock:
    now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    return written(tmp_path / "key_file.json", LIFETIME, clock)


def written(path: Path, *settings: Any) -> TokenStore:
    store = TokenStore(path, *settings)
    store.write()
    return store


def bearer(store: TokenStore, name: str) -> str:
    return f"Bearer {json.loads(store.path.read_text())[name]['key']}"


def test_the_key_file_has_the_format_of_torchserve_and_is_private(store):
    content = json.loads(store.path.read_text())
    assert list(content) == ["management", "inference", "API"]
    assert list(content["API"]) == ["key"]
    assert content["management"]["expiration time"] == "2026-11-20T21:38:11.933333Z"
    keys = {entry["key"] for entry in content.values()}
    assert len(keys) == 3
    assert all(re.fullmatch(r"[\w-]{8}", key) for key in keys)
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert list(store.path.parent.iterdir()) == [store.path]


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_valid_for_its_own_kind_only(kind, store):
    store.authorize(kind, bearer(store, kind))
    for name in {"inference", "management", "API"} - {kind}:
        with pytest.raises(InvalidToken, match="Token Authorization failed"):
            store.authorize(kind, bearer(store, name))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer \ud83d", "Bearer ä"])
def test_a_header_without_a_key_is_refused(header, store):
    with pytest.raises(InvalidToken, match="Token Authorization failed"):
        store.authorize("inference", header)


@pytest.mark.parametrize(
    "header", ["KEY", "bearer KEY", "Bearer KEY x", "Basic KEY", " Bearer KEY", "Bearer KEYx"]
)
def test_a_header_of_another_form_is_refused(header, store):
    key = bearer(store, "inference").removeprefix("Bearer ")
    with pytest.raises(InvalidToken, match="Token Authorization failed") as refused:
        store.authorize("inference", header.replace("KEY", key))
    assert refused.value.status == 400


def test_any_white_space_may_follow_the_scheme(store):
    store.authorize("inference", bearer(store, "inference").replace(" ", " \t "))


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_expires(kind, store, clock):
    header = bearer(store, kind)
    clock.now = START + LIFETIME - 0.001
    store.authorize(kind, header)
    clock.now = START + LIFETIME
    with pytest.raises(InvalidToken):
        store.authorize(kind, header)


@pytest.mark.parametrize("kind", KINDS)
def test_a_renewed_key_replaces_the_old_one_at_once(kind, store, clock):
    (other,) = set(KINDS) - {kind}
    old, untouched = bearer(store, kind), bearer(store, other)
    clock.now = START + 30
    store.renew(kind, bearer(store, "API"))
    with pytest.raises(InvalidToken):
        store.authorize(kind, old)
    clock.now = START + 89
    store.authorize(kind, bearer(store, kind))
    assert bearer(store, other) == untouched
    with pytest.raises(InvalidToken):
        store.authorize(other, untouched)


def test_the_api_key_outlives_the_others(store, clock):
    api = bearer(store, "API")
    clock.now = START + 1e9
    store.renew("inference", api)
    store.authorize("inference", bearer(store, "inference"))
    assert bearer(store, "API") == api


@pytest.mark.parametrize("kind", [None, "", "API", "Inference", "other"])
def test_only_the_two_kinds_are_renewed(kind, store):
    before = store.path.read_text()
    with pytest.raises(InvalidToken, match=r"^Token Authentication failed\."):
        store.renew(kind, bearer(store, "API"))
    assert store.path.read_text() == before


@pytest.mark.parametrize("name", ["inference", "management"])
def test_only_the_api_key_renews(name, store):
    before = store.path.read_text()
    with pytest.raises(InvalidToken, match=r"^Token Authentication failed\."):
        store.renew("inference", bearer(store, name))
    assert store.path.read_text() == before


def test_keys_are_new_at_every_start(store, clock):
    old = bearer(store, "inference")
    written(store.path, LIFETIME, clock)
    assert bearer(store, "inference") != old


def test_no_key_looks_like_an_option_of_a_command(tmp_path, clock, monkeypatch):
    random = iter(["-aaaaaaa", "--bbbbbb", "ccccccc-", "-ddddddd", "eeeeeeee", "ffffffff"])
    monkeypatch.setattr("secrets.token_urlsafe", lambda _length: next(random))
    store = written(tmp_path / "key_file.json", LIFETIME, clock)
    keys = {entry["key"] for entry in json.loads(store.path.read_text()).values()}
    assert keys == {"ccccccc-", "eeeeeeee", "ffffffff"}


def test_an_old_readable_key_file_is_replaced_by_a_private_one(tmp_path):
    path = tmp_path / "key_file.json"
    path.write_text("{}")
    path.chmod(0o644)
    written(path, LIFETIME)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_old_key_stays_valid_when_the_file_cannot_be_written(store):
    old, api = bearer(store, "inference"), bearer(store, "API")
    store.path.unlink()
    store.path.mkdir()
    with pytest.raises(IsADirectoryError):
        store.renew("inference", api)
    store.authorize("inference", old)
    assert list(store.path.parent.iterdir()) == [store.path]


def test_a_lifetime_beyond_the_year_9999_is_written_as_that_year(tmp_path):
    store = written(tmp_path / "key_file.json", 6e13)
    store.authorize("inference", bearer(store, "inference"))
    assert '"9999-12-31T' in store.path.read_text()


def test_close_removes_the_key_file_once(store):
    store.close()
    assert not store.path.exists()
    store.close()


def test_close_leaves_the_keys_of_another_server_alone(store, clock):
    written(store.path, LIFETIME, clock)
    store.close()
    assert store.path.exists()


def test_a_file_that_was_not_written_is_not_removed(tmp_path):
    path = tmp_path / "key_file.json"
    path.write_text("theirs")
    TokenStore(path, LIFETIME).close()
    assert path.read_text() == "theirs"


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_key_file_does_not_hold_the_end(store):
    store.path.unlink()
    os.mkfifo(store.path)
    store.close()
    assert store.path.is_fifo()
