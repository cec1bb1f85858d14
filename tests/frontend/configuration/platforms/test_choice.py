import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from marserve.frontend.configuration.addresses import Address
from marserve.frontend.configuration.config import KEYS, Config
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.platforms.choice import PLATFORMS, choose_platform
from marserve.frontend.configuration.platforms.platform import NONE, Surroundings
from marserve.frontend.configuration.properties import ConfigError

NOWHERE = Surroundings({}, {})


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)


def load(
    text: str = "",
    environ: Mapping[str, str] | None = None,
    platform: str | None = None,
    **flags: str,
) -> Config:
    Path("config.properties").write_text(text, encoding="utf-8")
    return load_config({"model_store": "store", **flags}, environ=environ or {}, platform=platform)


def test_nothing_is_recognised_and_nothing_changed_where_there_is_no_platform():
    config = load("inference_address=http://127.0.0.1:1")
    assert config.platform.name == NONE
    assert dataclasses.replace(config, notes=()) == dataclasses.replace(
        load("inference_address=http://127.0.0.1:1", platform=NONE),
        notes=(),
        platform=config.platform,
    )


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
def test_what_a_platform_changes_are_keys_and_values_that_can_be_read(platform):
    for change in platform.set_up(NOWHERE).changes:
        KEYS[change.key].from_text(change.text)
        assert change.reason


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
def test_an_empty_environment_is_no_platform(platform):
    assert platform.evidence(NOWHERE) == ""


def test_a_platform_that_does_not_exist_is_refused_with_the_names():
    with pytest.raises(ConfigError, match=r"--platform is kserve.* or none, not heroku"):
        choose_platform("heroku", NOWHERE)


def test_what_a_platform_requires_beats_the_file_and_the_command_line_beats_both():
    asked = "disable_token_authorization=false"
    assert load(asked).token_authorization
    config = load(asked, platform="kserve")
    assert not config.token_authorization
    assert "disable_token_authorization" in config.platform.texts
    config = load(asked, platform="kserve", disable_token_authorization="false")
    assert config.token_authorization
    assert "disable_token_authorization" not in config.platform.texts


def test_the_default_of_a_platform_gives_way_to_the_file():
    assert load(platform="kserve").metrics_address == Address("0.0.0.0", 8082)
    config = load("metrics_address=http://127.0.0.1:1", platform="kserve")
    assert config.metrics_address == Address("127.0.0.1", 1)


def test_a_snapshot_gets_what_the_user_has_set_and_not_what_the_platform_did():
    config = load("inference_address=http://0.0.0.0:8080", platform="kserve")
    assert config.inference_address == Address("127.0.0.1", 8085)
    assert config.texts["inference_address"] == "http://0.0.0.0:8080"
    assert "disable_token_authorization" not in config.texts


def test_one_note_tells_the_platform_why_and_what_it_changed():
    asked = "ts_open_inference_protocol=true"
    (note,) = [note for note in load(asked, platform="kserve").notes if "Platform" in note]
    assert note.startswith("Platform: KServe (--platform kserve). ")
    assert "disable_token_authorization=true" in note
    assert "ts_open_inference_protocol" not in note  # it was so
    assert "management_address=http://127.0.0.1:8086" in note


@pytest.mark.parametrize("template", ["{{.Labels.serviceEnvelope}}", "<no value>", ""])
def test_an_envelope_that_kserve_did_not_fill_in_counts_as_not_set(template):
    # The first in containers of one's own, the second where the label is missing.
    environ = {"TS_SERVICE_ENVELOPE": template, "PROTOCOL_VERSION": "v1"}
    config = load("enable_envvars_config=true", environ, platform="kserve")
    assert config.service_envelope is None
