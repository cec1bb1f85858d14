"""Properties file, environment and flags are resolved into one frozen `Config`.

Which file: the one in environment variable ``TS_CONFIG_FILE``, else ``--ts-config``, else the
newest snapshot, else ``config.properties`` in the working directory, else none (`config_file`).
Which value, strongest first:

1. environment variable ``TS_<KEY>``, only if the *file* says ``enable_envvars_config=true``
   (``allowed_urls`` also wants ``use_env_allowed_urls=true`` there); ``TS_OPEN_INFERENCE_PROTOCOL``
   needs no such leave, and decides alone when it is not empty
2. command line flag
3. the file, after ``$$NAME$$`` was replaced by environment variable NAME
4. the default, written beside each field of `Config`

A wrong value of a key that is read stops the start: a server that runs with another number than
the one its operator wrote is worse than one that says so. Where TorchServe started all the same,
this server does, too: any word but "true" is false, an unknown ``metrics_mode`` is log, and so on
for the keys with a `Key.instead`; keys that TorchServe has not are strict. What a value counts as,
and a key that is not read, leaves a sentence in `Config.warnings`.

Also unlike TorchServe: the file is UTF-8, and values lose white space at either end.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from marserve.frontend.configuration.addresses import check_schemes
from marserve.frontend.configuration.config import KEYS, Config, Key
from marserve.frontend.configuration.config_file import (
    Assignment,
    ConfigFile,
    find_config_file,
)
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.configuration.remarks import notes, warnings
from marserve.frontend.configuration.unread_keys import NOT_YET, RECORDS, WITHOUT_EFFECT

_WITHOUT_ENV_NAME = {
    *("models", "model_snapshot", "enable_envvars_config", "use_env_allowed_urls"),
    *("metric_time_interval", "system_metrics_cmd", "ts_open_inference_protocol"),
    *("use_native_io", "io_ratio", "version", "python", "vmargs", "plugins_path"),
    *("log_config", "tsConfigFile"),
}
_SECRETS = frozenset({"keystore_pass"})
_MAX_TEXT = 200


def load_config(
    flags: Mapping[str, str] | None = None,
    ts_config: str | None = None,
    environ: Mapping[str, str] = os.environ,
    snapshots: Path | None = None,
) -> Config:
    """Resolves file, environment and flags.

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
    names_models = "load_models" in (flags or {})
    file = find_config_file(ts_config, environ, snapshots, names_models=names_models)
    settings = {
        **file.settings,
        **_assignments(flags or {}, "command line"),
        **_assignments(_from_environment(file.settings, environ), "environment"),
        **_assignments(_protocol_from_environment(environ), "environment"),
    }
    values: dict[str, Any] = {}
    tolerated: list[str] = []
    for key in KEYS.values():
        if key.name in settings:
            values[key.name] = _value(key, settings[key.name], tolerated)
    _check_model_store(values.get("model_store"), file)
    config = Config(**values)
    _check_listeners(config)
    return replace(
        config,
        texts=_texts(settings, values, file),
        notes=tuple(notes(config, settings, file)),
        warnings=(*file.warnings, *tolerated, *warnings(config, settings, file)),
        is_snapshot_found=file.is_found,
    )


def _texts(
    settings: Mapping[str, Assignment], values: Mapping[str, object], file: ConfigFile
) -> dict[str, str]:
    """What was set, so that a server in another working directory would understand it.

    A secret is kept as the file has it, which may be ``$$NAME$$``: one that came through the
    environment is asked for there again, and never written down.
    """
    texts = {
        name: str(values[name]) if isinstance(values.get(name), Path) else setting.text
        for name, setting in settings.items()
        if name not in _SECRETS | RECORDS
    }
    if file.path is not None:
        texts["tsConfigFile"] = str(file.path.absolute())
    return texts | {name: file.raw[name] for name in _SECRETS & file.raw.keys()}


def _assignments(texts: Mapping[str, str], origin: str) -> dict[str, Assignment]:
    return {name: Assignment(text, origin) for name, text in texts.items()}


def _from_environment(
    in_file: Mapping[str, Assignment], environ: Mapping[str, str]
) -> dict[str, str]:
    def is_true(name: str) -> bool:
        return name in in_file and in_file[name].text.lower() == "true"

    if not is_true("enable_envvars_config"):
        return {}
    names = KEYS.keys() | WITHOUT_EFFECT.keys() | NOT_YET
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


def _value(key: Key, setting: Assignment, tolerated: list[str]) -> object:
    """The value of a text; or what it counts as, which is then added to ``tolerated``.

    Raises:
        ConfigError: It cannot be used.
    """
    if not setting.text and key.default is None:
        return None
    try:
        return key.parse(setting.text)
    except ValueError as error:
        entry = f"{key.name}={_shortened(setting.text)} ({setting.place})"
        if key.instead is None:
            raise ConfigError(f"Invalid configuration: {entry}: expected {error}") from error
        tolerated.append(f"{entry} is not {error}; it counts as {key.instead or 'not set'}.")
        return key.parse(key.instead) if key.instead or key.default is not None else None


def _shortened(text: str) -> str:
    """In one line, and not endless."""
    shortened = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return " ".join(shortened.split())


def _check_model_store(store: Path | None, file: ConfigFile) -> None:
    if store is None:
        why = f". {file.warnings[0]}" if file.is_found else ""
        raise ConfigError(f"Missing mandatory parameter --model-store{why}")
    if not store.is_dir():
        raise ConfigError(f"--model-store directory not found: {store}")


def _check_listeners(config: Config) -> None:
    try:
        check_schemes(config.listeners)
    except ValueError as error:
        raise ConfigError(f"Invalid configuration: {error}") from error
    if config.has_https:
        from marserve.frontend.configuration.tls import (
            server_context,  # costs time that only https is worth
        )

        server_context(config.tls_files)
