import os

import pytest

from marserve.frontend.errors import InvalidToken
from marserve.frontend.security.given_tokens import GivenTokens


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "inference").write_text("inference-1\n")
    (tmp_path / "management").write_text("management-1")
    return tmp_path


def is_good(tokens: GivenTokens, key: str, kind: str = "inference") -> bool:
    try:
        tokens.authorize(kind, f"Bearer {key}")
    except InvalidToken:
        return False
    return True


def test_a_key_is_good_for_its_own_kind(directory, clock):
    tokens = GivenTokens(directory, clock)
    assert is_good(tokens, "inference-1")
    assert is_good(tokens, "management-1", "management")
    assert not is_good(tokens, "management-1")
    assert not is_good(tokens, "inference-1", "management")
    with pytest.raises(InvalidToken):
        tokens.authorize("inference", None)


def test_keys_are_exchanged_without_a_restart(directory, clock):
    tokens = GivenTokens(directory, clock)
    (directory / "inference").write_text("inference-1\ninference-2\n")
    assert not is_good(tokens, "inference-2")
    clock.now = 5
    assert is_good(tokens, "inference-1")
    assert is_good(tokens, "inference-2")
    (directory / "inference").write_text("inference-2\n")
    clock.now = 10
    assert not is_good(tokens, "inference-1")
    assert is_good(tokens, "inference-2")


@pytest.mark.parametrize("text", ["", " \n", "short\n", "inference-1 k\n", "schlüssel\n", None])
def test_files_that_break_leave_the_old_keys_and_one_line(text, directory, clock, caplog):
    tokens = GivenTokens(directory, clock)
    file = directory / "inference"
    file.unlink() if text is None else file.write_text(text)
    for clock.now in (5, 10, 15):
        assert is_good(tokens, "inference-1")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with pytest.raises((OSError, ValueError)):
        GivenTokens(directory, clock)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_leaves_the_old_keys(directory, clock, caplog):
    tokens = GivenTokens(directory, clock)
    (directory / "inference").unlink()
    os.mkfifo(directory / "inference")
    clock.now = 5
    assert is_good(tokens, "inference-1")
    assert f"{directory}/inference is no file; the old keys stay." in caplog.text


def test_a_key_for_both_would_let_everybody_manage(directory):
    (directory / "inference").write_text("management-1")
    with pytest.raises(ValueError, match="both files"):
        GivenTokens(directory)


def test_nobody_renews_them_over_http(directory):
    tokens = GivenTokens(directory)
    with pytest.raises(InvalidToken, match="token_directory"):
        tokens.renew("inference", "Bearer inference-1")
