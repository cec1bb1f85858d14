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

A wrong value of a key that is read stops the start: a server that runs with another number than
the one its operator wrote is worse than one that says so. Where TorchServe started all the same,
this server does, too: any word but "true" is false, an unknown ``metrics_mode`` is log, and so on
for the keys with a `Key.instead`; keys that TorchServe has not are strict. What a value counts as,
and a key that is not read, leaves a sentence in `Config.warnings`.

Also unlike TorchServe: the file is UTF-8, and values lose white space at either end.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from marserve.frontend.configuration.addresses import check_schemes
from marserve.frontend.configuration.config import LOG4J_FILE, Config, Key, supported_keys
from marserve.frontend.configuration.config_file import ConfigFile, find_config_file
from marserve.frontend.configuration.models_key import unread_model_settings
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.configuration.unread_keys import (
    HARMLESS,
    NOT_YET,
    RECORDS,
    WITHOUT_EFFECT,
    unread_key,
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


_SECRETS = frozenset({"keystore_pass"})
_LONGEST_SHOWN = 200


class _Setting(NamedTuple):
    text: str
    origin: str
    line: int = 0  # of a file

    @property
    def place(self) -> str:
        """Where it was said."""
        return f"{self.origin}, line {self.line}" if self.line else self.origin


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
    names_models = "load_models" in (flags or {})
    file = find_config_file(ts_config, environ, snapshots, names_models=names_models)
    settings = {
        **_layer(file.texts, str(file.path), file.lines),
        **_layer(flags or {}, "command line"),
        **_layer(_from_environment(file.texts, environ), "environment"),
        **_layer(_protocol_from_environment(environ), "environment"),
    }
    values: dict[str, Any] = {}
    tolerated: list[str] = []
    for key in supported_keys():
        if key.name in settings:
            values[key.name] = _value(key, settings[key.name], tolerated)
    _check_model_store(values.get("model_store"), file)
    config = Config(**values)
    _check_listeners(config)
    return replace(
        config,
        texts=_texts(settings, values, file),
        notes=tuple(_notes(config, settings, file)),
        warnings=(*file.warnings, *tolerated, *_warnings(config, settings, file)),
        is_snapshot_found=file.is_found,
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
        if name not in _SECRETS | RECORDS
    }
    if file.path is not None:
        texts["tsConfigFile"] = str(file.path.absolute())
    return texts | {name: file.raw[name] for name in _SECRETS & file.raw.keys()}


def _layer(
    texts: Mapping[str, str], origin: str, lines: Mapping[str, int] | None = None
) -> dict[str, _Setting]:
    lines = lines or {}
    return {name: _Setting(text, origin, lines.get(name, 0)) for name, text in texts.items()}


def _from_environment(from_file: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    def is_true(name: str) -> bool:
        return from_file.get(name, "").lower() == "true"

    if not is_true("enable_envvars_config"):
        return {}
    names = {key.name for key in supported_keys()} | WITHOUT_EFFECT.keys() | NOT_YET
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


def _value(key: Key, setting: _Setting, tolerated: list[str]) -> object:
    """What a text says; or what it counts as, which is then told in ``tolerated``.

    Raises:
        ConfigError: It says nothing that can be used.
    """
    if not setting.text and key.default is None:
        return None
    try:
        return key.parse(setting.text)
    except ValueError as error:
        said = f"{key.name}={_shown(setting.text)} ({setting.place})"
        if key.instead is None:
            raise ConfigError(f"Invalid configuration: {said}: expected {error}") from error
        tolerated.append(f"{said} is not {error}; it counts as {key.instead or 'not set'}.")
        return key.parse(key.instead) if key.instead or key.default is not None else None


def _shown(text: str) -> str:
    """In one line, and not endless."""
    return " ".join(
        (text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...").split()
    )


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


def _warnings(config: Config, settings: Mapping[str, _Setting], file: ConfigFile) -> Iterator[str]:
    for name in sorted(file.raw.keys() - file.texts.keys()):
        yield f"{name} ({file.path}) is ignored: TorchServe wrote its own into its snapshots."
    if config.model_snapshot is not None:
        yield from _overruled(settings, str(file.path))
    supported = {key.name for key in supported_keys()} | RECORDS
    for name, setting in settings.items():
        if name not in supported | HARMLESS:
            yield unread_key(name, setting.place, supported - RECORDS)
    if "models" in settings:
        yield from unread_model_settings(settings["models"].text)
    yield from _unread_tls_keys(config, settings)
    if not config.is_private:
        yield from _any_url(config, settings)


def _harmless(config: Config, settings: Mapping[str, _Setting]) -> Iterator[str]:
    """What an ordinary configuration of TorchServe has, and nobody has to act on."""
    for name in sorted(settings.keys() & HARMLESS):
        yield unread_key(name, settings[name].place, ())
    for option in config.vmargs:
        if not LOG4J_FILE.fullmatch(option):
            place = settings["vmargs"].place
            yield f"vmargs ({place}): {option} has no effect: there is no Java virtual machine."
    if config.is_private:
        yield from _any_url(config, settings)


def _any_url(config: Config, settings: Mapping[str, _Setting]) -> Iterator[str]:
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
        yield f"{name} ({settings[name].place}) has no effect: {reason}."
    if config.has_https and not config.tls_files.are_given:
        alone = [name for name in pem if name in settings]
        reason = "neither keystore nor certificate_file is set"
        if alone:
            reason = f"{alone[0]} alone is not enough, {' and '.join(pem)} go together"
        yield f"https uses a self-signed certificate: {reason}."


def _overruled(settings: Mapping[str, _Setting], file: str) -> Iterator[str]:
    """What is asked for elsewhere than in the file that holds the snapshot, in vain."""
    setting = settings.get("load_models")
    if setting is not None and setting.origin != file:
        yield (
            f"load_models={setting.text} ({setting.place}) is ignored: the models are those of "
            f"the model_snapshot in {file}."
        )


def _notes(config: Config, settings: Mapping[str, _Setting], file: ConfigFile) -> Iterator[str]:
    yield f"Configuration file: {file.path.absolute() if file.path else 'none'}."
    if file.passed_over is not None:
        snapshot = file.passed_over.absolute()
        yield (
            f"The models are those of --models. The newest snapshot, {snapshot}, is passed over "
            "with its configuration; start without --models to restore it."
        )
    yield from _harmless(config, settings)
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


def _on_or_off(switch: bool) -> str:
    return "on" if switch else "off"


def _switch(state: str, key: str, chosen: bool | None, config: Config) -> str:
    if chosen is not None:
        return f"{state}: {key}={str(chosen).lower()}."
    reached = "every listener is" if config.is_private else "not every listener is"
    where = "loopback or a unix socket" if config.has_unix else "loopback"
    return f"{state}: {key} is not set and {reached} bound to {where}. Set it to decide yourself."
