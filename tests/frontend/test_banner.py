from pathlib import Path

import pytest

from marserve.frontend.banner import banner
from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.loading import load_config


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("LOG_LOCATION", "elsewhere")
    monkeypatch.chdir(tmp_path)
    Path("c").write_text(
        "model_store=.\nkeystore_pass=hidden\njob_queue_size=7\nmodels={\\n}\nload_models=all\n"
    )
    config = load_config({"load_models": "a.mar"}, "c", {})
    text = banner(config, gpus=2, cores=3, workdir=Path("/w"))
    return dict(line.partition(": ")[::2] for line in text.splitlines())


def test_surroundings_and_what_is_in_force(lines: dict[str, str], tmp_path: Path) -> None:
    assert lines["Number of GPUs"] == "2"
    assert lines["Number of CPUs"] == "3"
    assert lines["Temp directory"] == "/w"
    assert lines["Current directory"] == str(tmp_path)
    assert lines["Log dir"] == str(tmp_path / "elsewhere")
    assert lines["Model API enabled"] == "true"
    assert lines["job_queue_size"] == "7"
    assert lines["load_models"] == "a.mar"
    assert lines["model_store"] == str(tmp_path)
    assert lines["models"] == "{ }"


def test_every_key_with_a_value_is_told_and_no_secret(lines: dict[str, str]) -> None:
    assert {key.name for key in KEYS.values() if key.default is not None} <= lines.keys()
    assert lines["keystore_pass"] == "***"
    assert "hidden" not in str(lines)
