import contextlib
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.configuration.addresses import Address, UnixAddress
from marserve.frontend.configuration.config import KEYS, Config
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError, parse_properties

SAMPLE = Path(__file__).parents[3] / "config.properties"
ENVIRONMENT_ON = "enable_envvars_config=true\n"


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)


def load(text: str = "", environ: Mapping[str, str] | None = None, **flags: str) -> Config:
    Path("config.properties").write_text(text, encoding="utf-8")
    return load_config({"model_store": "store", **flags}, environ=environ or {})


# -- which file ------------------------------------------------------------------------------------


def test_without_a_file_the_defaults_hold():
    config = load_config({"model_store": "store"}, environ={})
    assert config.inference_address == Address("127.0.0.1", 8080)
    assert "Configuration file: none." in config.notes


def test_the_file_of_the_environment_beats_the_flag_and_the_flag_the_working_directory():
    for number, name in enumerate(["config.properties", "flag", "environment"], start=1):
        Path(name).write_text(f"model_store=store\njob_queue_size={number}")
    in_environment = {"TS_CONFIG_FILE": "environment"}
    assert load_config(environ={}).job_queue_size == 1
    assert load_config(ts_config="flag", environ={}).job_queue_size == 2
    assert load_config(ts_config="flag", environ=in_environment).job_queue_size == 3


@pytest.mark.parametrize(
    ("flag", "variable", "by"),
    [("gone", "", "--ts-config"), ("flag", "gone", r"TS_CONFIG_FILE \(environment\):")],
)
def test_a_named_file_must_exist(flag, variable, by):
    with pytest.raises(ConfigError, match=f"{by} file not found: gone"):
        load_config(ts_config=flag, environ={"TS_CONFIG_FILE": variable})


def test_a_store_is_known_without_dots_as_the_system_finds_it():
    # A snapshot names archives by their place in the store: it must be seen that they lie in it.
    Path("elsewhere/inner").mkdir(parents=True)
    Path("elsewhere/store").mkdir()
    Path("link").symlink_to("elsewhere/inner")
    config = load_config({"model_store": "link/../store"}, environ={})
    assert config.model_store == Path("elsewhere/store").resolve()


def test_a_snapshot_without_a_store_that_nobody_named_is_reported_as_the_reason():
    Path("config.properties").write_text("model_store=.")
    Path("snapshots").mkdir()
    Path("snapshots/a.cfg").write_text('model_snapshot={"modelCount": 0}\n')
    with pytest.raises(
        ConfigError, match=r"--model-store\. .* newest snapshot, .*a\.cfg, not from"
    ):
        load_config(environ={}, snapshots=Path("snapshots"))


def test_a_file_that_is_not_utf8_is_read_as_java_reads_it():
    Path("\xe4").mkdir()
    Path("config.properties").write_bytes(b"# se\xf1or\nmodel_store=\xe4")
    config = load_config(environ={})
    assert config.model_store == Path("\xe4").absolute()
    assert "config.properties is not UTF-8; it is read in Latin-1, as Java." in config.warnings


def test_a_file_that_cannot_be_read_is_refused():
    Path("folder").mkdir()
    Path("config.properties").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match="Cannot read the configuration file"):
        load_config(environ={})


# -- which value -----------------------------------------------------------------------------------


def test_flag_beats_file_and_environment_beats_flag():
    environ = {"TS_JOB_QUEUE_SIZE": "3"}
    assert load("job_queue_size=1").job_queue_size == 1
    assert load("job_queue_size=1", job_queue_size="2").job_queue_size == 2
    text = ENVIRONMENT_ON + "job_queue_size=1"
    assert load(text, environ, job_queue_size="2").job_queue_size == 3


def test_the_environment_counts_only_if_the_file_says_so():
    assert load("", {"TS_JOB_QUEUE_SIZE": "3"}).job_queue_size == 100
    environ = {"TS_JOB_QUEUE_SIZE": "3", "TS_ENABLE_ENVVARS_CONFIG": "true"}
    assert load("", environ).job_queue_size == 100


def test_the_token_life_time_has_a_variable_of_another_name():
    environ = {"TS_TOKEN_EXPIRATION_TIME_MIN": "0.5", "TS_TOKEN_EXPIRATION_MIN": "7"}
    assert load(ENVIRONMENT_ON, environ).token_expiration_min == 0.5


def test_metric_time_interval_has_no_variable():
    config = load(ENVIRONMENT_ON, {"TS_METRIC_TIME_INTERVAL": "1"})
    assert config.metric_time_interval == 60


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [
        ("", None, False),
        ("", "oip", True),
        ("ts_open_inference_protocol=true", None, True),
        ("ts_open_inference_protocol=oip", None, True),
        ("ts_open_inference_protocol=true", "", True),
        ("ts_open_inference_protocol=true", "v1", False),
        (ENVIRONMENT_ON + "ts_open_inference_protocol=true", "true", False),
    ],
)
def test_the_open_inference_variable_decides_alone_and_always(text, word, expected):
    environ = {} if word is None else {"TS_OPEN_INFERENCE_PROTOCOL": word}
    assert load(text, environ).ts_open_inference_protocol is expected


@pytest.mark.parametrize(("guard", "expected"), [("true", "s3://.*"), ("false", "file://.*")])
def test_allowed_urls_from_the_environment_want_a_second_switch(guard, expected):
    text = f"{ENVIRONMENT_ON}use_env_allowed_urls={guard}\nallowed_urls=file://.*"
    config = load(text, {"TS_ALLOWED_URLS": "s3://.*"})
    assert [pattern.pattern for pattern in config.allowed_urls] == [expected]


def test_variables_are_put_in_between_double_dollars():
    environ = {"HOST": "127.0.0.1", "PORT": "9"}
    config = load("inference_address=http://$$HOST$$:$$PORT$$", environ)
    assert config.inference_address == Address("127.0.0.1", 9)


def test_an_undefined_variable_between_double_dollars_stops_the_start():
    with pytest.raises(ConfigError, match=r"^Invalid Environment Variable NOWHERE$"):
        load("inference_address=$$NOWHERE$$")


def test_the_model_store_is_mandatory_and_must_exist():
    with pytest.raises(ConfigError, match="Missing mandatory parameter --model-store"):
        load_config(environ={})
    with pytest.raises(ConfigError, match=r"--model-store directory not found: .*/gone$"):
        load(model_store="gone")
    assert load().model_store == Path.cwd() / "store"


def test_a_workflow_store_of_the_file_may_be_missing_as_it_is_in_torchserves_image():
    config = load("workflow_store=gone")
    (warning,) = [each for each in config.warnings if "workflow_store" in each]
    assert re.match(r"workflow_store=/.*/gone \(.*, line 1\) is not there: until it is", warning)


# -- kinds of values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("inference_address", "http://0.0.0.0", Address("0.0.0.0", 80)),
        ("management_address", "http://box.local", Address("box.local", 8081)),
        ("metrics_address", "HTTP://[::1]", Address("::1", 8082)),
        ("metrics_address", "unix:/tmp/s", UnixAddress(Path("/tmp/s"))),
        ("grpc_inference_address", "Box.local", "box.local"),
        ("grpc_management_address", "[::1]", "::1"),
        ("grpc_management_address", "::", "::"),
        ("grpc_inference_port", "0", 0),
        ("grpc_compression", "GZIP", "gzip"),
        ("max_connections", "0", 0),
        ("keystore", "", None),
        ("keystore_pass", "", ""),
        ("keystore_type", "pkcs12", "PKCS12"),
        ("enable_metrics_api", "False", False),
        ("max_request_size", "+7", 7),
        ("default_response_timeout", "2.5", 2.5),
        ("drain_timeout", "0", 0.0),
        ("number_of_gpu", "0", 0),
        ("number_of_gpu", "", None),
        ("cors_allowed_origin", "*", "*"),
        ("cors_allowed_origin", "", None),
        ("load_models", "", ()),
        ("load_models", "ALL", ("all",)),
        ("load_models", "standalone", ()),
        ("load_models", '"Standalone"', ()),
        ("load_models", "a.mar, b=http://x/b.mar?v=1,", ("a.mar", "b=http://x/b.mar?v=1")),
        ("metrics_mode", "Prometheus", "prometheus"),
        ("model_catalog", "/shared/catalog.json", "/shared/catalog.json"),
        ("model_catalog", "S3://bucket/catalog.json", "s3://bucket/catalog.json"),
        ("model_catalog", "", None),
        ("model_catalog_mode", "Read-Only", "read-only"),
        ("model_catalog_interval", "0.5", 0.5),
        ("model_metrics_auto_detect", "TRUE", True),
        ("system_metrics_cmd", "my.py --gpu 'a b'", ("my.py", "--gpu", "a b")),
        ("log_format", "JSON", "json"),
        ("preload_modules", "torch, torchvision.ops", ("torch", "torchvision.ops")),
        ("preload_modules", "", ()),
        ("allowed_urls", "", ()),
        ("blacklist_env_vars", "AWS_.*", re.compile("AWS_.*")),
    ],
)
def test_a_value_is_read(key, text, expected):
    assert getattr(load(f"{key}={text}"), key) == expected


@pytest.mark.parametrize(
    ("key", "text", "allowed"),
    [
        ("inference_address", "127.0.0.1:8080", "http://host[:port], https://host[:port] or unix:"),
        ("inference_address", "http://127.0.0.1:65536", "a port from 0 to 65535"),
        ("request_head_timeout", "0", "a number above 0"),
        ("job_queue_size", "0", "a whole number, 1 or more"),
        ("job_queue_size", "1.5", "a whole number, 1 or more"),
        ("job_queue_size", "", "a whole number, 1 or more"),
        ("max_request_size", "9" * 5000, "a whole number, 1 or more"),
        ("default_workers_per_model", "-1", "a whole number from 0 to 1000"),
        ("default_workers_per_model", "1001", "a whole number from 0 to 1000"),
        ("default_response_timeout", "0.0", "a number above 0"),
        ("default_response_timeout", "nan", "a number above 0"),
        ("default_startup_timeout", "999999999999", "a number above 0, below 10^9"),
        ("drain_timeout", "1000000000", "a number, 0 or more, below 10^9"),
        ("drain_timeout", "-1", "a number, 0 or more"),
        ("worker_start_method", "fork", "one of forkserver, spawn"),
        ("log_format", "xml", "one of text, json"),
        ("model_catalog", "ftp://host/catalog.json", "a path, or a URL of http, https, s3"),
        ("model_catalog", "s3:///catalog.json", "a path, or a URL of http, https, s3"),
        ("model_catalog_mode", "auto", "one of read-only, read-write"),
        ("model_catalog_interval", "0", "a number above 0"),
        ("autoscale_workers", "yes", "true or false"),
        ("preload_modules", "torch vision", "import names"),
        ("blacklist_env_vars", "(", "a regular expression"),
        ("allowed_urls", "file://.*,[", "a regular expression"),
        ("default_batch_policy", "best", "one of fixed, greedy, adaptive, fixed_or_single"),
        (
            "models",
            '{"m": {"1.0": {"batchPolicy": "best"}}}',
            "batchPolicy of m 1.0 to be one of fixed, greedy",
        ),
        (
            "models",
            '{"m": {"1.0": {"compiledBatchSizes": "1,4"}}}',
            "compiledBatchSizes of m 1.0 to be a list of whole numbers",
        ),
    ],
)
def test_a_wrong_value_is_reported_with_what_is_allowed(key, text, allowed):
    sample = text if len(text) <= 200 else f"{text[:200]}..."
    place = "config.properties, line 1"
    start = re.escape(f"Invalid configuration: {key}={sample} ({place}): expected ")
    with pytest.raises(ConfigError, match=f"^{start}.*{re.escape(allowed)}"):
        load(f"{key}={text}")


@pytest.mark.parametrize(
    ("key", "text", "value", "words"),
    [
        ("enable_metrics_api", "yes", False, "true or false; it counts as false"),
        ("enable_metrics_api", "", False, "true or false; it counts as false"),
        ("enable_model_api", "1", False, "true or false; it counts as false"),
        ("disable_token_authorization", "on", False, "true or false; it counts as false"),
        ("async_logging", "truee", False, "true or false; it counts as false"),
        ("ts_open_inference_protocol", "v2", False, "true or false; it counts as false"),
        ("token_expiration_min", "never", 60, "a number above 0, below 10^9; it counts as 60"),
        ("metrics_mode", "loud", "log", "one of log, prometheus, legacy; it counts as log"),
        (
            "service_envelope",
            "{{.Labels.envelope}}",
            None,
            "the name of a module; it counts as not",
        ),
        ("python", "/no/such/python", None, "a program that can be run; it counts as not set"),
        ("keystore_type", "BKS", "PKCS12", "PKCS12; it counts as PKCS12"),
        ("vmargs", "-Da='b", (), "arguments, quoted as in a shell"),
        ("models", "", {}, "JSON like"),
        ("models", "{", {}, "JSON like"),
        ("models", "[]", {}, "JSON like"),
        ("models", '{"m": {"1.0": 4}}', {}, "JSON like"),
        ("models", "[" * 100_000, {}, "JSON like"),
    ],
)
def test_what_torchserve_started_with_does_not_stop_the_start(key, text, value, words):
    config = load(f"# a comment\n{key}={text}")
    assert getattr(config, key) == value
    sample = text if len(text) <= 200 else f"{text[:200]}..."
    entry = f"{key}={sample} (config.properties, line 2) is not {words}"
    assert [each for each in config.warnings if each.startswith(entry)]


def test_a_wrong_value_from_the_environment_is_reported_with_its_place():
    config = load(ENVIRONMENT_ON, {"TS_DECODE_INPUT_REQUEST": "no"})
    assert config.decode_input_request is False
    assert any("decode_input_request=no (environment) is not" in each for each in config.warnings)


_KEYS = st.sampled_from([*KEYS, "version", "no_such_key"])
_TEXTS = st.sampled_from(
    [
        "true",
        "0",
        "1e9",
        "9" * 20,
        "all",
        "(",
        "a'b",
        "$$HOME$$",
        "unix:/x",
        "unix:/\ud800",
        "http://[::1]:1",
        "http://h:99999",
        "{}",
        '{"m": {"1.0": {"batchSize": 4}}}',
        '{"models": {"": {}}}',
        '{"m": {"1.0": {"runtimeType": []}}}',
    ]
)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # those of re
@given(st.dictionaries(_KEYS, _TEXTS | st.text(st.characters()), min_size=1))
def test_any_values_are_a_config_or_a_config_error(texts):
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config({"model_store": "store", **texts}, environ={}), Config)


def test_the_default_urls_match_in_any_case():
    (pattern,) = load().allowed_urls
    assert pattern.fullmatch("HTTPS://example.com/a.mar")
    assert not pattern.fullmatch("s3://bucket/a.mar")


def test_models_json_may_say_how_requests_are_batched():
    entry = {
        "batchSize": "auto",
        "batchPolicy": "adaptive",
        "maxLatencyMs": 0,
        "compiledBatchSizes": [1, 4],
        "priorityQueueSizes": {"low": 3},
        "isolateFailures": False,
    }
    more = {**entry, "numRequests": None, "maxBatchDelay": "5", "maxWorkers": "many"}
    config = load(f"models={json.dumps({'m': {'1.0': more}})}")
    assert config.models == {"m": {"1.0": {**entry, "maxBatchDelay": 5}}}
    about_models = [note for note in config.warnings if note.startswith("models:")]
    assert about_models == [
        "models: numRequests=null of m 1.0 is ignored.",
        'models: maxWorkers="many" of m 1.0 is ignored.',
    ]


def test_models_json_gives_the_numbers_and_names_what_it_passes_over():
    config = load(
        r"""models={\
          "resnet": {"1.0": {"defaultVersion": true, "marName": "r.mar", "minWorkers": 1001, \
                             "batchSize": 4, "maxBatchDelay": 0, "maxWorkers": true, \
                             "startupTimeout": 2147483648, "responseTimeout": 9, \
                             "runtimeType": "java"}, \
                    "2.0": {"runtimeType": "python3"}}}"""
    )
    numbers = {"batchSize": 4, "responseTimeout": 9}
    assert config.models == {"resnet": {"1.0": numbers, "2.0": {"runtimeType": "python3"}}}
    about_models = [note for note in config.warnings if note.startswith("models:")]
    assert about_models == [
        "models: minWorkers=1001 of resnet 1.0 is ignored.",
        "models: maxBatchDelay=0 of resnet 1.0 is ignored.",
        "models: maxWorkers=true of resnet 1.0 is ignored.",
        "models: startupTimeout=2147483648 of resnet 1.0 is ignored.",
        'models: runtimeType="java" of resnet 1.0 is ignored.',
    ]


@pytest.mark.parametrize("other", ["load_models=all", 'model_snapshot={"modelCount": 0}'])
def test_nothing_else_names_models_beside_a_catalog(other):
    key = other.partition("=")[0]
    sentence = rf"{key} \(config.properties, line 2\) has no meaning beside model_catalog"
    with pytest.raises(ConfigError, match=sentence):
        load(f"model_catalog=catalog.json\n{other}")
    assert load("model_catalog=catalog.json\nload_models=").model_catalog is not None


def test_a_config_cannot_be_changed():
    config = load()
    with pytest.raises(AttributeError):
        config.job_queue_size = 5  # the point of the test


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("vmargs=-Xmx1g", None),
        ("vmargs=-Xmx1g -Dlog4j.configurationFile=file:///opt/a%20b.xml", "/opt/a b.xml"),
        ("vmargs=-Dlog4j2.configurationFile=/opt/l.properties", "/opt/l.properties"),
        ("vmargs=-Dlog4j.configurationFile=/opt/l.xml\nlog_config=/mine.yaml", "/mine.yaml"),
    ],
)
def test_the_logs_are_configured_by_their_key_or_as_a_jvm_would_be_configured(text, expected):
    assert load(text).log_settings == (None if expected is None else Path(expected))


# -- keys that are not read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("plugins_path", "has no effect"),
        ("own_key", "is an unknown key, ignored."),
        ("jub_queue_size", "is an unknown key, ignored; did you mean job_queue_size?"),
        ("Inference-Address", "is an unknown key, ignored; did you mean inference_address?"),
        ("jobQueueSize", "is an unknown key, ignored; did you mean job_queue_size?"),
        ("num_workers", "is an unknown key, ignored; did you mean default_workers_per_model?"),
        ("workers", "is an unknown key, ignored; did you mean default_workers_per_model?"),
        (
            "grpc_managment_max_connection_age_grace_ms",
            "is an unknown key, ignored; did you mean grpc_management_max_connection_age_grace_ms?",
        ),
        (
            "batch_size",
            "is an unknown key, ignored: it is a setting of a model, given as batchSize in its "
            'model-config.yaml, in models={"NAME": {"VERSION": {"batchSize": ...}}} '
            "or as batch_size when registering.",
        ),
        (
            "default_batch_size",
            "is an unknown key, ignored: it is a setting of a model, given as b",
        ),
        ("maxBatchDelay", "is an unknown key, ignored: it is a setting of a model, given as maxB"),
        ("response_timeout", "is an unknown key, ignored: it is a setting of a model, given as r"),
        (
            "device_type",
            "is an unknown key, ignored: it is a setting of a model, given as deviceType in its "
            "model-config.yaml.",
        ),
    ],
)
def test_a_key_that_is_not_read_is_noted(key, sentence):
    (note,) = (note for note in load(f"{key}=1").warnings if note.startswith(f"{key} "))
    assert note.startswith(f"{key} (config.properties, line 1) {sentence}")


def test_what_only_tuned_the_java_server_or_nothing_is_no_warning():
    config = load("number_of_netty_threads=32\nvmargs=-Xmx1g\nNUM_WORKERS=1")
    assert config.warnings == ()
    place = "number_of_netty_threads (config.properties, line 1)"
    assert f"{place} has no effect: one event loop serves all connections." in config.notes


def test_of_vmargs_only_what_is_not_read_is_noted():
    log = "-Dlog4j.configurationFile=/opt/l.xml"
    (note,) = [note for note in load(f"vmargs=-Xmx1g {log}").notes if note[:6] == "vmargs"]
    assert note.startswith("vmargs (config.properties, line 1): -Xmx1g has no effect")


@pytest.mark.parametrize(
    ("variable", "key"),
    [
        ("TS_DEBUG", "debug"),
    ],
)
def test_a_key_that_is_not_read_is_noted_from_the_environment_too(variable, key):
    notes = load(ENVIRONMENT_ON, {variable: "1"}).warnings
    assert any(note.startswith(f"{key} (environment) ") for note in notes)


def test_a_note_never_shows_a_password():
    notes = load("keystore_pass=hush").warnings
    assert any("keystore_pass" in note for note in notes)
    assert not any("hush" in note for note in notes)


# -- exposure --------------------------------------------------------------------------------------

LOOPBACK = "http://127.0.0.1:1"
EXPOSED = "http://0.0.0.0:1"


@pytest.mark.parametrize(
    ("inference", "management", "metrics"),
    list(itertools.product([LOOPBACK, EXPOSED], repeat=3)),
)
@pytest.mark.parametrize("metrics_api", ["true", "false"])
def test_unset_switches_follow_the_listeners(inference, management, metrics, metrics_api):
    config = load(
        f"inference_address={inference}\nmanagement_address={management}\n"
        f"metrics_address={metrics}\nenable_metrics_api={metrics_api}"
    )
    bound = [inference, management] + ([metrics] if metrics_api == "true" else [])
    is_exposed = EXPOSED in bound
    assert config.token_authorization is is_exposed
    assert config.model_api != is_exposed


@pytest.mark.parametrize("address", [LOOPBACK, EXPOSED])
@pytest.mark.parametrize("tokens", [None, "true", "false"])
@pytest.mark.parametrize("api", [None, "true", "false"])
def test_a_switch_that_is_set_wins_over_the_listeners(address, tokens, api):
    lines = [f"inference_address={address}"]
    lines += [f"disable_token_authorization={tokens}"] if tokens else []
    lines += [f"enable_model_api={api}"] if api else []
    config = load("\n".join(lines))
    is_exposed = address == EXPOSED
    assert config.token_authorization is (tokens == "false" if tokens else is_exposed)
    assert config.model_api is (api == "true" if api else not is_exposed)


def test_the_switches_may_come_from_flags_and_environment():
    text = f"{ENVIRONMENT_ON}inference_address={EXPOSED}"
    config = load(text, {"TS_ENABLE_MODEL_API": "true"}, disable_token_authorization="true")
    assert config.model_api
    assert not config.token_authorization


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (
            "",
            [
                "Token authorization is off: disable_token_authorization is not set and "
                "every listener is bound to loopback. Set it to decide yourself.",
                "Registering models over HTTP is on: enable_model_api is not set and "
                "every listener is bound to loopback. Set it to decide yourself.",
            ],
        ),
        (
            f"metrics_address={EXPOSED}\nenable_model_api=true",
            [
                "Token authorization is on: disable_token_authorization is not set and "
                "not every listener is bound to loopback. Set it to decide yourself.",
                "Registering models over HTTP is on: enable_model_api=true.",
            ],
        ),
    ],
)
def test_the_notes_say_which_rule_applied(text, notes):
    assert list(load(text).notes[-2:]) == notes


# -- listeners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "http", "https"),
    [
        ("inference_address", 80, 443),
        ("management_address", 8081, 8444),
        ("metrics_address", 8082, 8445),
    ],
)
def test_the_port_of_an_address_without_one(key, http, https, monkeypatch):
    monkeypatch.setattr("marserve.frontend.configuration.tls.server_context", lambda files: files)
    assert getattr(load(f"{key}=http://h"), key) == Address("h", http)
    assert getattr(load(f"{key}=https://h"), key) == Address("h", https, "https")


def test_sockets_in_the_file_system_are_private():
    config = load("inference_address=unix:/s\nmanagement_address=unix:/s\nenable_metrics_api=false")
    assert config.is_private
    assert not config.token_authorization
    assert "every listener is bound to loopback or a unix socket." in config.notes[-1]


def test_one_place_cannot_speak_http_and_https():
    text = "inference_address=https://127.0.0.1:1\nmanagement_address=http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="cannot both be served"):
        load(text)


def test_the_files_of_https_are_looked_at_before_the_start():
    files = "private_key_file=key.pem\ncertificate_file=chain.pem"
    with pytest.raises(ConfigError, match=r"Cannot read .*/key\.pem"):
        load(f"inference_address=https://127.0.0.1\n{files}")


HTTPS = "inference_address=https://127.0.0.1\n"


@pytest.mark.parametrize(
    ("text", "warnings"),
    [
        (
            "keystore_pass=x",
            [
                "keystore_pass ({file}, line 1) has no effect: no listener is https, and "
                "enable_grpc_ssl is not set."
            ],
        ),
        (
            f"{HTTPS}keystore=s\nkeystore_pass=x\ncertificate_file=c",
            ["certificate_file ({file}, line 4) has no effect: keystore is set."],
        ),
        (
            f"{HTTPS}keystore_pass=x\ncertificate_file=c\nprivate_key_file=k",
            ["keystore_pass ({file}, line 2) has no effect: keystore is not set."],
        ),
        (
            f"{HTTPS}private_key_file=k",
            [
                "https uses a self-signed certificate: private_key_file alone is not enough, "
                "private_key_file and certificate_file go together."
            ],
        ),
        (
            HTTPS,
            ["https uses a self-signed certificate: neither keystore nor certificate_file is set."],
        ),
    ],
)
def test_what_https_does_not_use_is_noted(text, warnings, monkeypatch):
    monkeypatch.setattr("marserve.frontend.configuration.tls.server_context", lambda files: files)
    sentences = [each for each in load(text).warnings if "https" in each or "keystore" in each]
    assert sentences == [each.format(file=Path("config.properties")) for each in warnings]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("", ["http://127.0.0.1:8082"]),
        ("management_address=http://127.0.0.1:8080", ["http://127.0.0.1:{}"] * 2),
    ],
)
def test_metrics_are_served_beside_their_own_place_where_the_others_share_one(addresses, expected):
    urls = [each.url for each in load(addresses).metrics_addresses]
    assert urls == [each.format(port) for each, port in zip(expected, (8080, 8082), strict=False)]


@pytest.mark.parametrize("models", ["true", "false"])
def test_open_urls_are_noted_while_models_can_be_registered(models):
    public = load(f"enable_model_api={models}\ninference_address=http://0.0.0.0")
    assert any("from any URL" in each for each in public.warnings) is (models == "true")
    private = load(f"enable_model_api={models}")
    assert not any("from any URL" in each for each in private.warnings)
    assert any("from any URL" in each for each in private.notes) is (models == "true")


# -- the sample file -------------------------------------------------------------------------------


def test_the_sample_shows_every_key_with_its_default():
    text = SAMPLE.read_text(encoding="utf-8")
    sample = parse_properties(re.sub(r"^#(?=[a-z_]+=)", "", text, flags=re.MULTILINE))
    defaults = Config(model_store=Path())
    assert list(sample) == list(KEYS)
    for key in KEYS.values():
        if key.name == "model_store":
            continue
        assert key.from_text(sample[key.name]) == getattr(defaults, key.name), key.name


def test_the_sample_can_be_used_as_it_is():
    Path("model_store").mkdir()
    config = load_config(ts_config=str(SAMPLE), environ={})
    assert config.model_store == Path("model_store").absolute()
    assert config.enable_model_api is None
    assert config.disable_token_authorization is None
    assert not any("ignored" in note or "no effect" in note for note in config.warnings)
