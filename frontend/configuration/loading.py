"""Resolves properties file, environment and flags into one frozen `Config` with its warnings.

Which file: the one in environment variable ``TS_CONFIG_FILE``, else ``--ts-config``, else the
newest snapshot, else ``config.properties`` in the working directory, else none (`config_file`).
Which value, strongest first:

1. environment variable ``TS_<KEY>``, only if the *file* says ``enable_envvars_config=true``
   (``allowed_urls`` also needs ``use_env_allowed_urls=true`` there); ``TS_OPEN_INFERENCE_PROTOCOL``
   always counts if it is not empty
2. command line flag
3. the requirements of the platform (`platforms`), such as no keys if its clients have none
4. the file, with ``$$NAME$$`` replaced by environment variable NAME
5. the default of the platform
6. the default of the field of `Config`

Snapshots do not contain the values of a platform: a restored server detects its platform again.

A wrong value stops the start. Where TorchServe starts (`Setting.instead`), this server starts, too,
with a warning in `Config.warnings`. Unlike in TorchServe, the file is UTF-8, and white space around
values is removed.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from marserve.frontend.configuration.addresses import UnixAddress, check_schemes
from marserve.frontend.configuration.config import KEYS, LOG4J_FILE, Config
from marserve.frontend.configuration.config_file import Assignment, ConfigFile, find_config_file
from marserve.frontend.configuration.models_key import MemberRefused, unread_model_settings
from marserve.frontend.configuration.platforms.choice import choose_platform
from marserve.frontend.configuration.platforms.platform import Surroundings
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.configuration.setting import Setting
from marserve.frontend.configuration.unread_keys import (
    HARMLESS,
    RECORDS,
    WITHOUT_EFFECT,
    unread_key,
)
from marserve.frontend.configuration.values import without_secrets

_WITHOUT_ENV_NAME = {
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
_SECRETS = frozenset({"keystore_pass"})
_MAX_TEXT = 200


def load_config(
    flags: Mapping[str, str] | None = None,
    ts_config: str | None = None,
    environ: Mapping[str, str] = os.environ,
    snapshots: Path | None = None,
    platform: str | None = None,
) -> Config:
    """Resolve file, environment and flags.

    ``flags`` are those of the command line, as keys and texts of the properties file.

    Raises:
        ConfigError: A file or directory is missing, or a value cannot be used.
    """
    names_models = "load_models" in (flags or {})
    file = find_config_file(ts_config, environ, snapshots, names_models=names_models)
    decided = {
        **_assignments(flags or {}, "command line"),
        **_assignments(_from_environment(file.settings, environ), "environment"),
    }
    set_by_user = {**file.settings, **decided}
    texts = {name: setting.text for name, setting in set_by_user.items()}
    surroundings = Surroundings(environ, texts, file.path, frozenset(decided))
    on_platform = choose_platform(platform, surroundings)
    settings = {**set_by_user, **_assignments(on_platform.texts, f"platform {on_platform.name}")}
    values: dict[str, Any] = {}
    tolerated: list[str] = []
    for key in KEYS.values():
        if key.name in settings:
            values[key.name] = _value(key, settings[key.name], tolerated)
    _check_model_store(values.get("model_store"), file)
    config = Config(**values, platform=on_platform)
    _check_listeners(config)
    _check_catalog(config, settings)
    return replace(
        config,
        texts=_texts(set_by_user, values, file),
        notes=tuple(_notes(config, settings, file)),
        warnings=(*file.warnings, *tolerated, *_warnings(config, settings, file)),
        is_snapshot_found=file.is_found,
    )


def _texts(
    settings: Mapping[str, Assignment], values: Mapping[str, object], file: ConfigFile
) -> dict[str, str]:
    """Return the values that were set, with absolute paths.

    A secret is as in the file, as ``$$NAME$$``, or left out.
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

    texts: dict[str, str] = {}
    if is_true("enable_envvars_config"):
        variables = environment_variables()
        if not is_true("use_env_allowed_urls"):
            del variables["allowed_urls"]
        texts = {name: environ[each] for name, each in variables.items() if each in environ}
    # TorchServe's special case: any word but "oip" turns the protocol off.
    if word := environ.get("TS_OPEN_INFERENCE_PROTOCOL"):
        texts["ts_open_inference_protocol"] = str(word == "oip").lower()
    return texts


def environment_variables() -> dict[str, str]:
    """Return the variables that override the file if ``enable_envvars_config`` is true, by key."""
    return {
        name: _variable_name(name)
        for name in sorted((KEYS.keys() | WITHOUT_EFFECT.keys()) - _WITHOUT_ENV_NAME)
    }


def _variable_name(key: str) -> str:
    if key == "token_expiration_min":
        return "TS_TOKEN_EXPIRATION_TIME_MIN"
    return "TS_" + key.upper().removeprefix("TS_")


def _value(key: Setting, setting: Assignment, tolerated: list[str]) -> object:
    """Return the value of a text, or its replacement with an entry in ``tolerated``."""
    try:
        return key.from_text(setting.text)
    except ValueError as error:
        text = setting.text if key.name == "allowed_urls" else without_secrets(setting.text)
        entry = f"{key.name}={_shortened(text)} ({setting.place})"
        if key.instead is None or isinstance(error, MemberRefused):
            raise ConfigError(f"Invalid configuration: {entry}: expected {error}") from error
        tolerated.append(f"{entry} is not {error}; it counts as {key.instead or 'not set'}.")
        return key.from_text(key.instead)


def _shortened(text: str) -> str:
    shortened = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return " ".join(shortened.split())


def _check_model_store(store: Path | None, file: ConfigFile) -> None:
    if store is None:
        why = f". {file.warnings[0]}" if file.is_found else ""
        raise ConfigError(f"Missing mandatory parameter --model-store{why}")
    if not store.is_dir():
        raise ConfigError(f"--model-store directory not found: {store}")


def _check_catalog(config: Config, settings: Mapping[str, Assignment]) -> None:
    if config.model_catalog_mode == "read-write":
        raise ConfigError(
            f"Invalid configuration: model_catalog_mode ({settings['model_catalog_mode'].place}): "
            "servers do not write a catalog any more. Replace the catalog to change its models, "
            "and remove the setting."
        )
    if config.model_catalog is None:
        return
    for name in ("load_models", "model_snapshot"):
        if name in settings and settings[name].text:
            raise ConfigError(
                f"Invalid configuration: {name} ({settings[name].place}) has no meaning beside "
                f"model_catalog ({settings['model_catalog'].place}): the models are those of the "
                "catalog. Write them there."
            )


def _check_listeners(config: Config) -> None:
    try:
        check_schemes(config.listeners)
    except ValueError as error:
        raise ConfigError(f"Invalid configuration: {error}") from error
    if config.has_tls:
        # Slow to import.
        from marserve.frontend.configuration.tls import server_context

        server_context(config.tls_files)


def _warnings(
    config: Config, settings: Mapping[str, Assignment], file: ConfigFile
) -> Iterator[str]:
    if not config.workflows_directory.is_dir():
        # The configuration of TorchServe's image names one that the image never makes.
        place = settings["workflow_store"].place
        yield (
            f"workflow_store={config.workflow_store} ({place}) is not there: until it is, no "
            "workflow can be registered from it."
        )
    for name in sorted(file.raw.keys() - file.settings.keys()):
        yield f"{name} ({file.path}) is ignored: TorchServe wrote its own into its snapshots."
    models = settings.get("load_models")
    if config.model_snapshot is not None and models and models.origin != str(file.path):
        yield (
            f"load_models={models.text} ({models.place}) is ignored: the models are those of "
            f"the model_snapshot in {file.path}."
        )
    for name, setting in settings.items():
        if name not in KEYS.keys() | RECORDS | HARMLESS:
            yield unread_key(name, setting.place, KEYS)
    if "models" in settings:
        yield from unread_model_settings(settings["models"].text)
    yield from _unread_tls_keys(config, settings)
    if not config.is_private:
        yield from _any_url(config, settings)


def _any_url(config: Config, settings: Mapping[str, Assignment]) -> Iterator[str]:
    if "allowed_urls" not in settings and config.model_api:
        yield "Models may be registered from any URL, because allowed_urls is not set."


def _unread_tls_keys(config: Config, settings: Mapping[str, Assignment]) -> Iterator[str]:
    pem = ("private_key_file", "certificate_file")
    store = ("keystore", "keystore_pass", "keystore_type")
    if not config.has_tls:
        unread, reason = {*pem, *store}, "no listener is https, and enable_grpc_ssl is not set"
    elif config.keystore is not None:
        unread, reason = set(pem), "keystore is set"
    else:
        unread, reason = set(store), "keystore is not set"
    for name in sorted(unread & settings.keys()):
        yield f"{name} ({settings[name].place}) has no effect: {reason}."
    if config.has_tls and not config.tls_files.are_configured:
        alone = [name for name in pem if name in settings]
        reason = "neither keystore nor certificate_file is set"
        if alone:
            reason = f"{alone[0]} alone is not enough, {' and '.join(pem)} go together"
        yield f"{'https' if config.has_https else 'gRPC'} uses a self-signed certificate: {reason}."


def _notes(config: Config, settings: Mapping[str, Assignment], file: ConfigFile) -> Iterator[str]:
    yield f"Configuration file: {file.path.absolute() if file.path else 'none'}."
    if config.platform.note:
        yield config.platform.note
    if file.passed_over is not None:
        snapshot = file.passed_over.absolute()
        instead = "model_catalog" if config.model_catalog else "--models"
        yield (
            f"The models are those of {instead}. The newest snapshot, {snapshot}, is passed over "
            f"with its configuration; start without {instead} to restore it."
        )
    for name in sorted(settings.keys() & HARMLESS):
        yield unread_key(name, settings[name].place, ())
    for option in config.vmargs:
        if not LOG4J_FILE.fullmatch(option):
            place = settings["vmargs"].place
            yield f"vmargs ({place}): {option} has no effect: there is no Java virtual machine."
    if config.is_private:
        yield from _any_url(config, settings)
    tokens, model_api = config.token_authorization, config.model_api
    chosen = config.disable_token_authorization
    if chosen is None and config.token_directory is not None:
        yield f"Token authorization is on: token_directory={config.token_directory}."
    else:
        yield _switch("Token authorization", tokens, "disable_token_authorization", chosen, config)
    chosen = config.enable_model_api
    yield _switch("Registering models over HTTP", model_api, "enable_model_api", chosen, config)


def _switch(what: str, is_on: bool, key: str, chosen: bool | None, config: Config) -> str:
    state = f"{what} is {'on' if is_on else 'off'}"
    if chosen is not None:
        return f"{state}: {key}={str(chosen).lower()}."
    reached = "every listener is" if config.is_private else "not every listener is"
    has_unix = any(isinstance(each, UnixAddress) for each in config.listeners)
    where = "loopback or a unix socket" if has_unix else "loopback"
    return f"{state}: {key} is not set and {reached} bound to {where}. Set it to decide yourself."
