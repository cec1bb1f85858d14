import os
import sys
from pathlib import Path

import pytest

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.config_file import find_config_file, newest_snapshot
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError

NO_MODELS = 'model_snapshot={"modelCount": 0}'


@pytest.fixture(autouse=True)
def snapshots(tmp_path, monkeypatch):
    """The directory of snapshots, with two of them; the first was written last."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "logs" / "config"
    directory.mkdir(parents=True)
    for age, name in enumerate(["20260101000000000-startup", "20270101000000000-shutdown"]):
        file = directory / f"{name}.cfg"
        file.write_text(f"model_store=.\njob_queue_size={age + 1}\n{NO_MODELS}\n")
        os.utime(file, (1000 - age, 1000 - age))
    return directory


def test_the_newest_snapshot_is_the_one_that_was_written_last(snapshots):
    for name in (".20280101000000000-startup.cfg", "notes.txt"):
        (snapshots / name).touch()
    (snapshots / "folder.cfg").mkdir()
    newest = newest_snapshot(snapshots)
    assert newest == (snapshots / "20260101000000000-startup.cfg", [])
    assert newest_snapshot(snapshots / "folder.cfg") == (None, [])
    assert newest_snapshot(snapshots / "nowhere") == (None, [])


def test_of_two_written_at_once_the_later_name_counts(snapshots):
    for file in snapshots.iterdir():
        os.utime(file, ns=(5, 5))
    assert newest_snapshot(snapshots) == (snapshots / "20270101000000000-shutdown.cfg", [])


def test_the_newest_snapshot_beats_the_working_directory_and_says_so(snapshots):
    beaten = Path("config.properties").absolute()
    beaten.write_text("job_queue_size=7")
    file = find_config_file(None, {}, snapshots)
    assert file.settings["job_queue_size"].text == "1"
    (surprise,) = file.warnings
    assert str(beaten) in surprise
    assert str(file.path) in surprise
    assert "--ncs" in surprise
    config = load_config(environ={}, snapshots=snapshots)
    assert surprise in config.warnings
    assert config.is_snapshot_found


def test_a_named_file_beats_the_newest_snapshot(snapshots):
    Path("mine").write_text("job_queue_size=7")
    for named in [("mine", {}), (None, {"TS_CONFIG_FILE": "mine"})]:
        file = find_config_file(*named, snapshots)
        assert {key: each.text for key, each in file.settings.items()} == {"job_queue_size": "7"}
        assert file.warnings == ()
        assert not file.is_found


def test_models_of_the_command_line_win_over_a_snapshot_of_an_earlier_run(snapshots):
    passed_over = f"{snapshots / '20260101000000000-startup.cfg'}, is passed over"
    flags = {"model_store": ".", "load_models": "a=m.mar"}
    config = load_config(flags, environ={}, snapshots=snapshots)
    assert (config.load_models, config.job_queue_size) == (("a=m.mar",), 100)
    assert "Configuration file: none." in config.notes
    assert [text for text in config.notes if passed_over in text]
    assert not [text for text in config.warnings if passed_over in text]  # it is what was asked for
    Path("config.properties").write_text("job_queue_size=7\nload_models=b.mar\n")
    config = load_config(flags, environ={}, snapshots=snapshots)
    assert (config.load_models, config.job_queue_size) == (("a=m.mar",), 7)
    assert [text for text in config.notes if passed_over in text]


def test_a_catalog_of_the_working_directory_wins_over_a_snapshot_of_an_earlier_run(snapshots):
    Path("config.properties").write_text("model_store=.\nmodel_catalog=catalog.json\n")
    config = load_config(environ={}, snapshots=snapshots)
    assert (config.model_snapshot, config.job_queue_size) == (None, 100)
    passed_over = f"{snapshots / '20260101000000000-startup.cfg'}, is passed over"
    (note,) = [text for text in config.notes if passed_over in text]
    assert note.startswith("The models are those of model_catalog.")


def test_models_of_the_working_directory_do_not_win_over_a_snapshot(snapshots):
    Path("config.properties").write_text("load_models=b.mar\n")
    config = load_config(environ={}, snapshots=snapshots)
    assert (config.load_models, config.job_queue_size) == ((), 1)


def test_without_snapshots_they_are_not_looked_at():
    assert find_config_file(None, {}, None).path is None


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        ("", "it is empty"),
        ("\0" * 4096, "it is empty"),
        ("#Saving snapshot\nmodel_store=.\n", "it ends too early"),
        (f"model_store=.\n{NO_MODELS[:-1]}", "it ends too early"),
        ("model_store=\\u00", "it ends too early"),
        (f"{NO_MODELS}\nmodel_store=.\njob_queue_size=1", "its last line is cut short"),
    ],
)
def test_a_damaged_newest_snapshot_started_an_empty_server(snapshots, content, damage):
    damaged = snapshots / "20290101000000000-snapshot.cfg"
    damaged.write_text(content)
    file = find_config_file(None, {}, snapshots)
    assert file.settings["job_queue_size"].text == "1"
    assert file.warnings[0] == f"The snapshot {damaged} is passed over: {damage}."
    assert "20260101000000000-startup.cfg" in file.warnings[1]


def test_where_no_snapshot_is_whole_the_working_directory_counts(snapshots):
    Path("config.properties").write_text("job_queue_size=7")
    for file in snapshots.iterdir():
        file.write_bytes(file.read_bytes()[:-5])
    chosen = find_config_file(None, {}, snapshots)
    assert chosen.settings["job_queue_size"].text == "7"
    assert len(chosen.warnings) == 2
    assert not chosen.is_found


def test_a_snapshot_only_its_line_break_was_cut_off_is_whole(snapshots):
    edited = snapshots / "20290101000000000-snapshot.cfg"
    edited.write_text(f"model_store=.\n{NO_MODELS}")
    assert newest_snapshot(snapshots) == (edited, [])


def test_a_snapshot_that_is_whole_and_wrong_stops_the_start(snapshots):
    wrong = snapshots / "20290101000000000-snapshot.cfg"
    wrong.write_text('model_store=.\nmodel_snapshot={"modelCount": "many"}\n')
    with pytest.raises(ConfigError, match="modelCount"):
        load_config(environ={}, snapshots=snapshots)


# -- what is restored ------------------------------------------------------------------------------

MODELS = '{"modelCount": 1, "models": {"m": {"1.0": {"marName": "m.mar", "minWorkers": 1, '
MODELS += '"maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}}}}'


def test_models_asked_for_elsewhere_are_reported_as_ignored():
    Path("saved").write_text(
        f"model_store=.\nload_models=all\nmodel_snapshot={MODELS}\nversion=1\n"
    )
    quiet = load_config(ts_config="saved", environ={})
    assert quiet.model_snapshot is not None
    assert not [text for text in quiet.warnings if "load_models" in text or "version" in text]
    config = load_config({"load_models": "x.mar"}, "saved", {})
    (warning,) = [text for text in config.warnings if text.startswith("load_models=x.mar")]
    assert "command line" in warning
    assert "the model_snapshot in saved" in warning


def test_a_broken_snapshot_is_reported_in_one_short_line():
    Path("saved").write_text("model_store=.\nmodel_snapshot={" + "broken\\n" * 1000)
    with pytest.raises(ConfigError) as refused:
        load_config(ts_config="saved", environ={})
    sentence = str(refused.value)
    assert sentence.startswith("Invalid configuration: model_snapshot={broken broken")
    assert "the JSON that a snapshot holds" in sentence
    assert len(sentence) < 700
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("lines", "is_chosen"),
    [
        (f"model_snapshot={MODELS}\nversion=0.12.0\n", False),
        (f"model_snapshot={MODELS}\n", False),
        (f"model_snapshot={MODELS}\nversion=marserve 0.1.0\n", True),
        ("version=0.12.0\n", True),
    ],
)
def test_the_interpreter_in_a_snapshot_of_torchserve_is_not_ours(lines, is_chosen):
    Path("saved").write_text(f"model_store=.\npython={sys.executable}\n{lines}")
    config = load_config(ts_config="saved", environ={})
    assert ("python" in config.texts) is is_chosen
    warning = "python (saved) is ignored: TorchServe wrote its own into its snapshots."
    assert (warning in config.warnings) is not is_chosen


# -- what a snapshot remembers of the configuration ------------------------------------------------


def test_the_texts_of_what_was_set_are_kept_with_absolute_paths():
    text = "model_store=.\nown_key=1\njob_queue_size=3\nenable_envvars_config=true\nversion=0.12\n"
    Path("c").write_text(text)
    environ = {"TS_JOB_QUEUE_SIZE": "5"}
    config = load_config({"load_models": "all"}, "c", environ)
    assert config.texts == {
        "model_store": str(Path.cwd()),
        "own_key": "1",
        "job_queue_size": "5",
        "enable_envvars_config": "true",
        "load_models": "all",
        "tsConfigFile": str(Path("c").absolute()),
    }


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("keystore_pass=open", "open"),
        ("keystore_pass=$$SECRET$$", "$$SECRET$$"),
        ("", None),
    ],
)
def test_a_secret_that_came_through_the_environment_is_not_kept(line, kept):
    Path("c").write_text(f"model_store=.\nenable_envvars_config=true\n{line}\n")
    environ = {"SECRET": "hidden", "TS_KEYSTORE_PASS": "hidden too"}
    config = load_config({}, "c", environ)
    assert config.keystore_pass == "hidden too"
    assert config.texts.get("keystore_pass") == kept


# -- settings between which a line break is missing ---------------------------------------------


def load_text(text: str) -> Config:
    Path("ts.properties").write_text(f"model_store=.\n{text}\n")
    return load_config(ts_config="ts.properties", environ={})


def test_what_sagemakers_toolkit_writes_is_two_settings():
    config = load_text(
        "enable_model_api=truedefault_response_timeout=60\ndefault_workers_per_model=2"
    )
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
def test_settings_on_one_line_are_split(line, expected):
    config = load_text(line)
    assert (config.job_queue_size, config.metrics_mode, config.default_service_handler) == expected
    is_reported = any("a line break is missing" in warning for warning in config.warnings)
    assert is_reported is (config.default_service_handler is None)


def test_what_is_glued_to_no_known_key_is_one_value():
    config = load_text("enable_model_api=trueish=1")
    assert config.enable_model_api is False
    assert any("enable_model_api=trueish=1 (ts.properties, line 2)" in x for x in config.warnings)
