from pathlib import Path

import pytest

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.loading import load_config


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str) -> Config:
    Path("ts.properties").write_text(f"model_store=.\n{text}\n")
    return load_config(ts_config="ts.properties", environ={})


def test_what_sagemakers_toolkit_writes_is_two_settings() -> None:
    config = load("enable_model_api=truedefault_response_timeout=60\ndefault_workers_per_model=2")
    assert config.enable_model_api is True
    assert config.default_response_timeout == 60
    assert config.default_workers_per_model == 2
    assert (
        "ts.properties, line 2: between the settings enable_model_api, default_response_timeout a "
        "line break is missing; they are read as if it were there."
    ) in config.warnings


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("job_queue_size=7metrics_mode=prometheus", (7, "prometheus", None)),
        ("prefer_direct_buffer=Truejob_queue_size: 7", (7, "log", None)),
        ("enable_metrics_api=falsejob_queue_size=7metrics_mode=legacy", (7, "legacy", None)),
        ("async_logging=trueinference_address=http://127.0.0.1:1", (100, "log", None)),
        ("default_service_handler=7job_queue_size=9", (100, "log", "7job_queue_size=9")),
    ],
)
def test_settings_that_are_taken_apart(line: str, expected: object) -> None:
    config = load(line)
    assert (config.job_queue_size, config.metrics_mode, config.default_service_handler) == expected
    is_reported = any("a line break is missing" in warning for warning in config.warnings)
    assert is_reported is (config.default_service_handler is None)


def test_what_is_glued_to_no_known_key_is_one_value() -> None:
    config = load("enable_model_api=trueish=1")
    assert config.enable_model_api is False
    assert any("enable_model_api=trueish=1 (ts.properties, line 2)" in x for x in config.warnings)
