# ruff: noqa: RUF009  _key() and _optional() are dataclasses.field() with our metadata
"""Properties file, environment and flags settle into one frozen `Config`.

Which file: the one in environment variable ``TS_CONFIG_FILE``, else ``--ts-config``, else the
newest snapshot, else ``config.properties`` in the working directory, else none (`config_file`).
Which value, strongest first:

1. environment variable ``TS_<KEY>``, only if the *file* says ``enable_envvars_config=true``
   (``allowed_urls`` also wants ``use_env_allowed_urls=true`` there); ``TS_OPEN_INFERENCE_PROTOCOL``
   needs no such leave, and decides alone when it is not empty
2. command line flag
3. the file, after ``$$NAME$$`` was replaced by environment variable NAME
4. the default, written beside each field of `Config`

Units: times are float seconds, sizes are bytes; ``token_expiration_min`` alone is in minutes.

A wrong value of a key that is read stops the start: a server that runs with another number than
the one its operator wrote is worse than one that says so. TorchServe was softer here and there
(any word but "true" meant false, an unknown ``metrics_mode`` meant log). A key that is known but
not read, or not known at all, only leaves a sentence in `Config.warnings`.

Also unlike TorchServe: the file is UTF-8, and values lose white space at either end.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote

from marserve.frontend.addresses import (
    Address,
    TlsFiles,
    UnixAddress,
    check_schemes,
    keystore_type,
    listener_address,
)
from marserve.frontend.config_file import ConfigFile, find_config_file
from marserve.frontend.properties import ConfigError, parse_properties
from marserve.frontend.saved_models import SavedModel, saved_models
from marserve.frontend.values import (
    MOST_WORKERS,
    ModelNumbers,
    absolute_path,
    arguments,
    boolean,
    identifier,
    model_numbers,
    models_to_load,
    modules,
    not_negative,
    one_of,
    pattern,
    positive,
    program,
    unread_model_settings,
    url_patterns,
    whole,
)

__all__ = [
    "Address",
    "Config",
    "ConfigError",
    "Key",
    "load_config",
    "parse_properties",
    "supported_keys",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """One key of the properties file.

    Args:
        name: The key, which is also the name of the `Config` field.
        parse: Text to value; raises ValueError with the words of what is allowed.
        default: Text of the default; None if the key has none.
    """

    name: str
    parse: Callable[[str], object]
    default: str | None


# Typed as the value rather than as the dataclasses.Field they are, as field() itself is.
def _key(parse: Callable[[str], T], default: str) -> T:
    made: Any = field(
        default_factory=lambda: parse(default), metadata={"parse": parse, "default": default}
    )
    return cast("T", made)


def _optional(parse: Callable[[str], T]) -> T | None:
    made: Any = field(default=None, metadata={"parse": parse})
    return cast("T", made)


def _open_inference(text: str) -> bool:
    """Reads true or false, or ``oip``: the word that the environment variable wants."""
    return text == "oip" or boolean(text)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything the server was told, settled. Each field is a key of the properties file.

    The two security switches ``enable_model_api`` and ``disable_token_authorization`` stay None
    when nobody set them; `model_api` and `token_authorization` say what is in force.
    """

    # Listeners
    inference_address: Address | UnixAddress = _key(
        listener_address(80, 443), "http://127.0.0.1:8080"
    )
    management_address: Address | UnixAddress = _key(
        listener_address(8081, 8444), "http://127.0.0.1:8081"
    )
    metrics_address: Address | UnixAddress = _key(
        listener_address(8082, 8445), "http://127.0.0.1:8082"
    )
    enable_metrics_api: bool = _key(boolean, "true")
    keystore: Path | None = _optional(absolute_path)
    keystore_pass: str = _key(str, "changeit")
    keystore_type: str = _key(keystore_type, "PKCS12")
    private_key_file: Path | None = _optional(absolute_path)
    certificate_file: Path | None = _optional(absolute_path)
    request_head_timeout: float = _key(positive, "60")
    max_connections: int = _key(whole(0), "0")  # of a listener; 0: what file descriptors allow
    max_request_size: int = _key(whole(1), "6553500")
    max_response_size: int = _key(whole(1), "6553500")
    max_stream_backlog: int = _key(whole(0), "67108864")  # 0: no limit
    cors_allowed_origin: str | None = _optional(str)
    cors_allowed_methods: str | None = _optional(str)
    cors_allowed_headers: str | None = _optional(str)
    ts_open_inference_protocol: bool = _key(_open_inference, "false")

    # Who may do what
    enable_model_api: bool | None = _optional(boolean)
    disable_token_authorization: bool | None = _optional(boolean)
    token_expiration_min: float = _key(positive, "60")  # minutes

    # Models
    model_store: Path = field(metadata={"parse": absolute_path})
    load_models: tuple[str, ...] = _key(models_to_load, "")
    models: ModelNumbers = _key(model_numbers, "{}")
    model_snapshot: tuple[SavedModel, ...] | None = _optional(saved_models)
    snapshots_kept: int = _key(whole(0), "100")  # of each kind; 0: none is written
    allowed_urls: tuple[re.Pattern[str], ...] = _key(url_patterns, "file://.*|http(s)?://.*")
    max_archive_size: int = _key(whole(0), "0")  # 0: as much as the disk has free
    default_service_handler: str | None = _optional(str)
    service_envelope: str | None = _optional(identifier)
    decode_input_request: bool = _key(boolean, "true")
    limit_max_image_pixels: bool = _key(boolean, "true")
    install_py_dep_per_model: bool = _key(boolean, "false")
    dependency_cache: Path | None = _optional(absolute_path)  # None: the user's cache directory

    # Workers
    default_workers_per_model: int = _key(whole(0, MOST_WORKERS), "0")
    job_queue_size: int = _key(whole(1), "100")
    default_response_timeout: float = _key(positive, "120")
    default_startup_timeout: float = _key(positive, "120")
    unregister_model_timeout: float = _key(positive, "120")
    drain_timeout: float = _key(not_negative, "30")
    autoscale_workers: bool = _key(boolean, "false")
    number_of_gpu: int | None = _optional(whole(0))  # None: as many as are found
    initial_worker_port: int = _key(whole(1), "9000")
    initial_distribution_port: int = _key(whole(1), "29500")
    python: Path | None = _optional(program)  # None: the server's
    worker_start_method: str = _key(one_of("forkserver", "spawn"), "forkserver")
    preload_modules: tuple[str, ...] = _key(modules, "torch")
    blacklist_env_vars: re.Pattern[str] | None = _optional(pattern)
    cpu_launcher_enable: bool = _key(boolean, "false")
    cpu_launcher_args: str | None = _optional(str)
    ipex_enable: bool = _key(boolean, "false")
    ipex_gpu_enable: bool = _key(boolean, "false")

    # Metrics
    metrics_mode: str = _key(one_of("log", "prometheus", "legacy"), "log")
    metrics_config: Path | None = _optional(absolute_path)
    model_metrics_auto_detect: bool | None = _optional(boolean)  # see telemetry.metrics_config
    disable_system_metrics: bool = _key(boolean, "false")
    system_metrics_cmd: tuple[str, ...] = _key(arguments, "")
    metric_time_interval: float = _key(positive, "60")

    # Logs
    log_config: Path | None = _optional(absolute_path)
    vmargs: tuple[str, ...] = _key(arguments, "")
    log_format: str = _key(one_of("text", "json"), "text")
    async_logging: bool = _key(boolean, "false")

    # Where values may come from
    enable_envvars_config: bool = _key(boolean, "false")
    use_env_allowed_urls: bool = _key(boolean, "false")

    # What was set, as text, and what a snapshot remembers of it; no keys.
    texts: Mapping[str, str] = field(default_factory=dict)

    # What the operator is told at start; no keys.
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def listeners(self) -> tuple[Address | UnixAddress, ...]:
        """The addresses that will be bound."""
        metrics = (self.metrics_address,) if self.enable_metrics_api else ()
        return (self.inference_address, self.management_address, *metrics)

    @property
    def metrics_addresses(self) -> tuple[Address | UnixAddress, ...]:
        """Where /metrics is served: also where inference and management share an address."""
        if self.inference_address != self.management_address:
            return (self.metrics_address,)
        return tuple(dict.fromkeys((self.inference_address, self.metrics_address)))

    @property
    def has_https(self) -> bool:
        """Whether any listener speaks TLS."""
        return any(isinstance(one, Address) and one.scheme == "https" for one in self.listeners)

    @property
    def has_unix(self) -> bool:
        """Whether any listener is a socket in the file system."""
        return any(isinstance(one, UnixAddress) for one in self.listeners)

    @property
    def tls_files(self) -> TlsFiles:
        """What https listeners prove their identity with."""
        return TlsFiles(
            self.keystore, self.keystore_pass, self.private_key_file, self.certificate_file
        )

    @property
    def is_private(self) -> bool:
        """Whether no other machine can reach any listener."""
        return all(address.is_private for address in self.listeners)

    @property
    def token_authorization(self) -> bool:
        """Whether requests need a token: as set, else unless the server `is_private`."""
        if self.disable_token_authorization is None:
            return not self.is_private
        return not self.disable_token_authorization

    @property
    def local_management(self) -> bool:
        """Whether only programs of this machine may manage: nobody said that tokens are off."""
        return not self.token_authorization and self.disable_token_authorization is None

    @property
    def log_settings(self) -> Path | None:
        """The file that configures the logs: ``log_config``, else what ``vmargs`` tells log4j."""
        if self.log_config is not None:
            return self.log_config
        named = [one for one in map(_LOG4J_FILE.fullmatch, self.vmargs) if one]
        return Path(unquote(named[-1][1])).absolute() if named else None

    @property
    def model_api(self) -> bool:
        """Whether models may be registered over HTTP: as set, else if the server `is_private`."""
        return self.is_private if self.enable_model_api is None else self.enable_model_api


def supported_keys() -> tuple[Key, ...]:
    """Every key that is read, in the order of the `Config` fields."""
    return tuple(
        Key(each.name, each.metadata["parse"], each.metadata.get("default"))
        for each in fields(Config)
        if each.metadata
    )


_LOG4J_FILE = re.compile(r"-Dlog4j2?\.configuration(?:File)?=(?:file:(?://)?)?(/?[^:]+)")
_JVM = "there is no Java virtual machine to set up"
_NETTY = "one event loop serves all connections"
_SOCKETPAIR = "workers are always reached over socket pairs"
_WITHOUT_EFFECT = {
    "cpp_log_config": "there is no C++ backend",
    "debug": "workers cannot be attached by hand",
    "io_ratio": _NETTY,
    "model_server_home": "the package knows where its own files are",
    "netty_client_threads": _NETTY,
    "number_of_netty_threads": _NETTY,
    "plugins_path": "Java plugins cannot be loaded",
    "prefer_direct_buffer": _JVM,
    "use_native_io": _SOCKETPAIR,
}
_NOT_YET = frozenset(
    {
        "grpc_inference_address",
        "grpc_management_address",
        "grpc_inference_port",
        "grpc_management_port",
        "grpc_inference_max_connection_age_ms",
        "grpc_management_max_connection_age_ms",
        "grpc_inference_max_connection_age_grace_ms",
        "grpc_management_max_connection_age_grace_ms",
        "enable_grpc_ssl",
        "workflow_store",
        "ts_header_key_sequence_id",
        "ts_header_key_sequence_start",
        "ts_header_key_sequence_end",
    }
)
_WITHOUT_ENV_NAME = frozenset(
    {
        "models",
        "model_snapshot",
        "enable_envvars_config",
        "use_env_allowed_urls",
        "metric_time_interval",
        "system_metrics_cmd",
        "ts_open_inference_protocol",
        "use_native_io",
        "io_ratio",
        "version",
        "python",
        "vmargs",
        "plugins_path",
        "log_config",
        "tsConfigFile",
    }
)


#: What a server writes into its snapshots and never reads.
_RECORDS = frozenset({"tsConfigFile", "version"})
_SECRETS = frozenset({"keystore_pass"})
_LONGEST_SHOWN = 200


class _Setting(NamedTuple):
    text: str
    origin: str


def load_config(
    flags: Mapping[str, str] | None = None,
    ts_config: str | None = None,
    environ: Mapping[str, str] = os.environ,
    snapshots: Path | None = None,
) -> Config:
    """Settles file, environment and flags.

    Args:
        flags: What the command line set, as key and text of the properties file.
        ts_config: The file named by ``--ts-config``; ``TS_CONFIG_FILE`` beats it.
        environ: The environment.
        snapshots: Directory of snapshots, the newest of which may be read; None for none.

    Returns:
        The configuration, with `Config.notes` and `Config.warnings` filled in.

    Raises:
        ConfigError: A file or directory is missing, or a value cannot be used.
    """
    file = find_config_file(ts_config, environ, snapshots)
    settings = {
        **_layer(file.texts, str(file.path)),
        **_layer(flags or {}, "command line"),
        **_layer(_from_environment(file.texts, environ), "environment"),
        **_layer(_protocol_from_environment(environ), "environment"),
    }
    values: dict[str, Any] = {
        key.name: _value(key, settings) for key in supported_keys() if key.name in settings
    }
    _check_model_store(values.get("model_store"))
    config = Config(**values)
    _check_listeners(config)
    return replace(
        config,
        texts=_texts(settings, values, file),
        notes=tuple(_notes(config, file.path)),
        warnings=tuple(_warnings(config, settings, file)),
    )


def _texts(
    settings: Mapping[str, _Setting], values: Mapping[str, object], file: ConfigFile
) -> dict[str, str]:
    """What was set, so that a server in another working directory would understand it.

    A secret is kept as the file has it, which may be ``$$NAME$$``: one that came through the
    environment is asked for there again, and never written down.
    """
    texts = {
        name: str(values[name]) if isinstance(values.get(name), Path) else setting.text
        for name, setting in settings.items()
        if name not in _SECRETS | _RECORDS
    }
    if file.path is not None:
        texts["tsConfigFile"] = str(file.path.absolute())
    return texts | {name: file.raw[name] for name in _SECRETS & file.raw.keys()}


def _layer(texts: Mapping[str, str], origin: str) -> dict[str, _Setting]:
    return {name: _Setting(text, origin) for name, text in texts.items()}


def _from_environment(from_file: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    def is_true(name: str) -> bool:
        return from_file.get(name, "").lower() == "true"

    if not is_true("enable_envvars_config"):
        return {}
    names = {key.name for key in supported_keys()} | _WITHOUT_EFFECT.keys() | _NOT_YET
    names -= _WITHOUT_ENV_NAME
    if not is_true("use_env_allowed_urls"):
        names.discard("allowed_urls")
    return {
        name: environ[variable]
        for name in sorted(names)
        if (variable := _variable_name(name)) in environ
    }


def _protocol_from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """TorchServe's special case: any word but ``oip`` turns the protocol off."""
    word = environ.get("TS_OPEN_INFERENCE_PROTOCOL")
    return {"ts_open_inference_protocol": str(word == "oip").lower()} if word else {}


def _variable_name(key: str) -> str:
    if key == "token_expiration_min":
        return "TS_TOKEN_EXPIRATION_TIME_MIN"
    return "TS_" + key.upper().removeprefix("TS_")


def _value(key: Key, settings: Mapping[str, _Setting]) -> object:
    text, origin = settings[key.name]
    if not text and key.default is None:
        return None
    try:
        return key.parse(text)
    except ValueError as error:
        shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
        raise ConfigError(
            f"Invalid configuration: {key.name}={' '.join(shown.split())} ({origin}): "
            f"expected {error}"
        ) from error


def _check_model_store(store: Path | None) -> None:
    if store is None:
        raise ConfigError("Missing mandatory parameter --model-store")
    if not store.is_dir():
        raise ConfigError(f"--model-store directory not found: {store}")


def _check_listeners(config: Config) -> None:
    try:
        check_schemes(config.listeners)
    except ValueError as error:
        raise ConfigError(f"Invalid configuration: {error}") from error
    if config.has_https:
        from marserve.frontend.tls import server_context  # costs time that only https is worth

        server_context(config.tls_files)


def _warnings(config: Config, settings: Mapping[str, _Setting], file: ConfigFile) -> Iterator[str]:
    if file.surprise:
        yield file.surprise
    for name in sorted(file.raw.keys() - file.texts.keys()):
        yield f"{name} ({file.path}) is ignored: TorchServe wrote its own into its snapshots."
    if config.model_snapshot is not None:
        yield from _overruled(settings, str(file.path))
    supported = {key.name for key in supported_keys()} | _RECORDS
    for name, setting in settings.items():
        if name not in supported:
            yield _unread(name, setting.origin)
    if "models" in settings:
        yield from unread_model_settings(settings["models"].text)
    for option in config.vmargs:
        if not _LOG4J_FILE.fullmatch(option):
            yield f"vmargs ({settings['vmargs'].origin}): {option} has no effect: {_JVM}."
    yield from _unread_tls_keys(config, settings)
    if "allowed_urls" not in settings and config.model_api:
        yield "Models may be registered from any URL, because allowed_urls is not set."


def _unread_tls_keys(config: Config, settings: Mapping[str, _Setting]) -> Iterator[str]:
    pem = ("private_key_file", "certificate_file")
    store = ("keystore", "keystore_pass", "keystore_type")
    if not config.has_https:
        unread, reason = {*pem, *store}, "no listener is https"
    elif config.keystore is not None:
        unread, reason = set(pem), "keystore is set"
    else:
        unread, reason = set(store), "keystore is not set"
    for name in sorted(unread & settings.keys()):
        yield f"{name} ({settings[name].origin}) has no effect: {reason}."
    if config.has_https and not (config.keystore or config.certificate_file):
        yield "https uses a self-signed certificate: neither keystore nor certificate_file is set."


def _overruled(settings: Mapping[str, _Setting], file: str) -> Iterator[str]:
    """What is asked for elsewhere than in the file that holds the snapshot, in vain."""
    setting = settings.get("load_models")
    if setting is not None and setting.origin != file:
        yield (
            f"load_models={setting.text} ({setting.origin}) is ignored: the models are those of "
            f"the model_snapshot in {file}."
        )


def _notes(config: Config, path: Path | None) -> Iterator[str]:
    yield f"Configuration file: {path.absolute() if path else 'none'}."
    yield _switch(
        f"Token authorization is {_on_or_off(config.token_authorization)}",
        "disable_token_authorization",
        config.disable_token_authorization,
        config,
    )
    yield _switch(
        f"Registering models over HTTP is {_on_or_off(config.model_api)}",
        "enable_model_api",
        config.enable_model_api,
        config,
    )


def _unread(name: str, origin: str) -> str:
    if name in _WITHOUT_EFFECT:
        return f"{name} ({origin}) has no effect: {_WITHOUT_EFFECT[name]}."
    if name in _NOT_YET:
        return f"{name} ({origin}) is known to TorchServe, not supported yet, ignored."
    return f"{name} ({origin}) is an unknown key, ignored."


def _on_or_off(switch: bool) -> str:
    return "on" if switch else "off"


def _switch(state: str, key: str, chosen: bool | None, config: Config) -> str:
    if chosen is not None:
        return f"{state}: {key}={str(chosen).lower()}."
    reached = "every listener is" if config.is_private else "not every listener is"
    where = "loopback or a unix socket" if config.has_unix else "loopback"
    return f"{state}: {key} is not set and {reached} bound to {where}. Set it to decide yourself."
