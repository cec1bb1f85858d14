import os

import pytest

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.registration import debugging
from marserve.frontend.registration.debugging import for_debugging


class NoTerminal:
    def __init__(self) -> None:
        raise OSError


class Background:
    is_ours = False


class Foreground(Background):
    is_ours = True


@pytest.fixture
def config(tmp_path):
    return Config(model_store=tmp_path)


@pytest.mark.parametrize(
    ("terminal", "model", "foreground", "reason"),
    [
        (Foreground, "m", False, "needs --foreground"),
        (NoTerminal, "m", True, "needs a terminal"),
        (Background, "m", True, "in the background"),
        (Foreground, "", True, "expected MODEL or MODEL=FILE"),
        (Foreground, "m=gone.py", True, "expected MODEL or MODEL=FILE"),
        (Foreground, "m=", True, "expected MODEL or MODEL=FILE"),
    ],
)
def test_it_is_refused_where_nobody_could_debug(
    config, monkeypatch, terminal, model, foreground, reason
):
    monkeypatch.setattr(debugging, "Terminal", terminal)
    with pytest.raises(ConfigError, match=reason):
        for_debugging(config, model, foreground=foreground)


@pytest.mark.parametrize("key", ["inference_address", "management_address", "metrics_address"])
def test_it_is_refused_where_others_could_read_code(tmp_path, monkeypatch, key):
    monkeypatch.setattr(debugging, "Terminal", Foreground)
    config = load_config({"model_store": str(tmp_path), key: "http://0.0.0.0:1"}, environ={})
    with pytest.raises(ConfigError, match="needs listeners on loopback"):
        for_debugging(config, "m", foreground=True)


def test_nothing_of_it_is_saved_or_waits_for_a_breakpoint(config, monkeypatch, tmp_path):
    monkeypatch.setattr(debugging, "Terminal", Foreground)
    (tmp_path / "h.py").touch()
    monkeypatch.chdir(tmp_path)
    changed = for_debugging(config, "m=h.py:entry", foreground=True)
    assert changed.debugged is not None
    assert changed.debugged.handler == f"{os.path.realpath(tmp_path)}/h.py:entry"
    assert (changed.snapshots_kept, changed.drain_timeout) == (0, 0.0)
    assert "debug" not in str(changed.texts)
