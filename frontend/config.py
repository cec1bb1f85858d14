# ruff: noqa: RUF009  _key() and _optional() are dataclasses.field() with our metadata
"""Properties file, environment and flags settle into one frozen `Config`.

Which file: the one in environment variable ``TS_CONFIG_FILE``, else ``--ts-config``, else
``config.properties`` in the working directory, else none. Which value, strongest first:

1. environment variable ``TS_<KEY>``, only if the *file* says ``enable_envvars_config=true``
   (``allowed_urls`` also wants ``use_env_allowed_urls=true`` there)
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

from marserve.frontend.properties import ConfigError, parse_properties
from marserve.frontend.values import (
    Address,
    ModelNumbers,
    absolute_path,
    boolean,
    http_address,
    model_numbers,
    models_to_load,
    modules,
    not_negative,
    one_of,
    pattern,
    positive,
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


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything the server was told, settled. Each field is a key of the properties file.

    The two security switches ``enable_model_api`` and ``disable_token_authorization`` stay None
    when nobody set them; `model_api` and `token_authorization` say what is in force.
    """

    # Listeners
    inference_address: Address = _key(http_address(80), "http://127.0.0.1:8080")
    management_address: Address = _key(http_address(8081), "http://127.0.0.1:8081")
    metrics_address: Address = _key(http_address(8082), "http://127.0.0.1:8082")
    enable_metrics_api: bool = _key(boolean, "true")
    max_request_size: int = _key(whole(1), "6553500")
    max_response_size: int = _key(whole(1), "6553500")
    cors_allowed_origin: str | None = _optional(str)
    cors_allowed_methods: str | None = _optional(str)
    cors_allowed_headers: str | None = _optional(str)

    # Who may do what
    enable_model_api: bool | None = _optional(boolean)
    disable_token_authorization: bool | None = _optional(boolean)
    token_expiration_min: float = _key(positive, "60")  # minutes

    # Models
    model_store: Path = field(metadata={"parse": absolute_path})
    load_models: tuple[str, ...] = _key(models_to_load, "")
    models: ModelNumbers = _key(model_numbers, "{}")
    allowed_urls: tuple[re.Pattern[str], ...] = _key(url_patterns, "file://.*|http(s)?://.*")
    max_archive_size: int = _key(whole(0), "0")  # 0: as much as the disk has free
    default_service_handler: str | None = _optional(str)
    decode_input_request: bool = _key(boolean, "true")
    limit_max_image_pixels: bool = _key(boolean, "true")

    # Workers
    default_workers_per_model: int = _key(whole(0), "0")
    job_queue_size: int = _key(whole(1), "100")
    default_response_timeout: float = _key(positive, "120")
    default_startup_timeout: float = _key(positive, "120")
    unregister_model_timeout: float = _key(positive, "120")
    drain_timeout: float = _key(not_negative, "30")
    number_of_gpu: int | None = _optional(whole(0))  # None: as many as are found
    initial_worker_port: int = _key(whole(1), "9000")
    worker_start_method: str = _key(one_of("forkserver", "spawn"), "forkserver")
    preload_modules: tuple[str, ...] = _key(modules, "torch")
    blacklist_env_vars: re.Pattern[str] | None = _optional(pattern)

    # Metrics
    metrics_mode: str = _key(one_of("log", "prometheus", "legacy"), "log")
    disable_system_metrics: bool = _key(boolean, "false")
    metric_time_interval: float = _key(positive, "60")

    # Where values may come from
    enable_envvars_config: bool = _key(boolean, "false")
    use_env_allowed_urls: bool = _key(boolean, "false")

    # What the operator is told at start; no keys.
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def listeners(self) -> tuple[Address, ...]:
        """The addresses that will be bound."""
        metrics = (self.metrics_address,) if self.enable_metrics_api else ()
        return (self.inference_address, self.management_address, *metrics)

    @property
    def is_private(self) -> bool:
        """Whether no other machine can reach any listener."""
        return all(address.is_loopback for address in self.listeners)

    @property
    def token_authorization(self) -> bool:
        """Whether requests need a token: as set, else unless the server `is_private`."""
        if self.disable_token_authorization is None:
            return not self.is_private
        return not self.disable_token_authorization

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


_JVM = "there is no Java virtual machine to set up"
_NETTY = "one event loop serves all connections"
_SOCKETPAIR = "workers are always reached over socket pairs"
_WITHOUT_EFFECT = {
    "async_logging": "logs are written as they come",
    "io_ratio": _NETTY,
    "log_config": "log4j2 files are not read",
    "model_server_home": "the package knows where its own files are",
    "netty_client_threads": _NETTY,
    "number_of_netty_threads": _NETTY,
    "plugins_path": "Java plugins cannot be loaded",
    "prefer_direct_buffer": _JVM,
    "python": "workers run under the interpreter of the server",
    "tsConfigFile": "it is a record in snapshots, not a setting",
    "use_native_io": _SOCKETPAIR,
    "version": "it is a record in snapshots, not a setting",
    "vmargs": _JVM,
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
        "ts_open_inference_protocol",
        "keystore",
        "keystore_pass",
        "keystore_type",
        "private_key_file",
        "certificate_file",
        "workflow_store",
        "model_snapshot",
        "service_envelope",
        "install_py_dep_per_model",
        "initial_distribution_port",
        "debug",
        "cpp_log_config",
        "ts_header_key_sequence_id",
        "ts_header_key_sequence_start",
        "ts_header_key_sequence_end",
        "ipex_enable",
        "ipex_gpu_enable",
        "cpu_launcher_enable",
        "cpu_launcher_args",
        "metrics_config",
        "model_metrics_auto_detect",
        "system_metrics_cmd",
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


class _Setting(NamedTuple):
    text: str
    origin: str


def load_config(
    flags: Mapping[str, str] | None = None,
    ts_config: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Settles file, environment and flags.

    Args:
        flags: What the command line set, as key and text of the properties file.
        ts_config: The file named by ``--ts-config``; ``TS_CONFIG_FILE`` beats it.
        environ: The environment.

    Returns:
        The configuration, with `Config.notes` and `Config.warnings` filled in.

    Raises:
        ConfigError: A file or directory is missing, or a value cannot be used.
    """
    path = _choose_file(ts_config, environ)
    from_file = _read_file(path, environ) if path else {}
    settings = {
        **_layer(from_file, str(path)),
        **_layer(flags or {}, "command line"),
        **_layer(_from_environment(from_file, environ), "environment"),
    }
    values: dict[str, Any] = {
        key.name: _value(key, settings) for key in supported_keys() if key.name in settings
    }
    _check_model_store(values.get("model_store"))
    config = Config(**values)
    return replace(
        config,
        notes=tuple(_notes(config, path)),
        warnings=tuple(_warnings(config, settings)),
    )


def _choose_file(ts_config: str | None, environ: Mapping[str, str]) -> Path | None:
    named = environ.get("TS_CONFIG_FILE") or ts_config
    path = Path(named or "config.properties")
    if path.is_file():
        return path
    if named:
        raise ConfigError(f"--ts-config file not found: {named}")
    return None


def _read_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error}") from error
    return {
        name: _replace_variables(value, environ) for name, value in parse_properties(text).items()
    }


def _replace_variables(value: str, environ: Mapping[str, str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        try:
            return environ[match[1]]
        except KeyError:
            raise ConfigError(f"Invalid Environment Variable {match[1]}") from None

    return re.sub(r"\$\$([^$]+)\$\$", replacement, value)


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
        raise ConfigError(
            f"Invalid configuration: {key.name}={text} ({origin}): expected {error}"
        ) from error


def _check_model_store(store: Path | None) -> None:
    if store is None:
        raise ConfigError("Missing mandatory parameter --model-store")
    if not store.is_dir():
        raise ConfigError(f"--model-store directory not found: {store}")


def _warnings(config: Config, settings: Mapping[str, _Setting]) -> Iterator[str]:
    supported = {key.name for key in supported_keys()}
    for name, setting in settings.items():
        if name not in supported:
            yield _unread(name, setting.origin)
    if "models" in settings:
        yield from unread_model_settings(settings["models"].text)
    if "allowed_urls" not in settings and config.model_api:
        yield "Models may be registered from any URL, because allowed_urls is not set."


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
    return f"{state}: {key} is not set and {reached} bound to loopback. Set it to decide yourself."
