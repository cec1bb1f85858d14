"""Checks of ``config.properties`` and snapshots, by the server's readers."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from marserve.frontend.configuration.config import KEYS, LOG4J_FILE, Config
from marserve.frontend.configuration.config_file import Assignment, ConfigFile, read_config_file
from marserve.frontend.configuration.models_key import MemberRefused, unread_model_settings
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.configuration.setting import Setting
from marserve.frontend.configuration.unread_keys import HARMLESS, RECORDS, unread_key
from marserve.tools.doctor import compatibility
from marserve.tools.doctor.checks.gains import unbatched
from marserve.tools.doctor.checks.handlers import is_installed
from marserve.tools.doctor.findings import Finding, Fix, Place
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Source
from marserve.tools.doctor.surroundings import Surroundings

_QUOTED = 200
_SECTION = "Configuration keys"
# Read regardless of the file.
_ALWAYS_READ = ("TS_CONFIG_FILE", "TS_OPEN_INFERENCE_PROTOCOL", "TS_MODEL_SERVER_HOME")
_GRPC_PORTS = ("grpc_inference_port", "grpc_management_port")
_NOT_COUNTED = ("vmargs",)  # of which some have no effect
_PATHS = ("model_store", "workflow_store", "keystore", "private_key_file", "certificate_file",
          "metrics_config", "log_config")  # fmt: skip


def check_properties(source: Source, around: Surroundings) -> Iterator[Finding]:
    """Check a configuration file."""
    here = os.environ if around.is_here else {}
    environ = _Environment({**here, **around.environment(source)})
    try:
        file = read_config_file(source.path, environ, source.content)
    except ConfigError as error:
        yield finding("config-file", Place(source.name), str(error))
        return
    values, wrong = _values(source, file)
    yield from wrong
    yield from _lines(source, file)
    yield from _keys(source, file)
    config = Config(**{"model_store": source.path.parent} | values)
    yield from _settings(source, file, config, around)
    yield from _variables(source, file, environ, around)
    if around.is_here:
        yield from _paths(source, file, config)
    count = len([name for name in values if name not in _NOT_COUNTED])
    what = f"{count} key{'' if count == 1 else 's'} of {source.name}"
    yield finding("unchanged", Place(source.name), what)


class _Environment(dict[str, str]):
    """Variables of images and pods; unset ones are recorded and read as 1."""

    def __init__(self, known: Mapping[str, str]) -> None:
        super().__init__(known)
        self.missing: list[str] = []

    def __missing__(self, name: str) -> str:
        self.missing.append(name)
        return "1"


def _values(source: Source, file: ConfigFile) -> tuple[dict[str, Any], list[Finding]]:
    """Return the valid values by key, and findings about the invalid ones."""
    values: dict[str, Any] = {}
    wrong = []
    for name, setting in file.settings.items():
        key = KEYS.get(name)
        if key is None or (not setting.text and key.default is None):
            continue
        try:
            values[name] = key.from_text(setting.text)
        except ValueError as error:
            if "$$" not in file.raw.get(name, ""):
                wrong.append(_wrong_value(source, key, setting, error))
    return values, wrong


def _wrong_value(source: Source, key: Setting, setting: Assignment, error: ValueError) -> Finding:
    place = Place(source.name, setting.line)
    text = f"{key.name}={' '.join(setting.text.split())[:_QUOTED]}"
    if key.instead is not None and not isinstance(error, MemberRefused):
        return finding(
            "config-ignored",
            place,
            f"{text} is not {error}; it is read as {key.instead or 'not set'}.",
            "Write the intended value.",
        )
    return finding(
        "config-value",
        place,
        f"{text} prevents the start: the key takes {error}.",
        _instead(key.name, setting.text),
        fixes=_port_fixes(source, key.name, setting.line, setting.text),
    )


def _port_in(text: str) -> str:
    match = re.fullmatch(r"(?:\w+://)?[^:/]+:(\d+)", text)
    return match[1] if match else ""


def _instead(name: str, text: str) -> str:
    if name in _GRPC_PORTS and (port := _port_in(text)):
        address = name.replace("_port", "_address")
        return f"Write {name}={port}; the host belongs to {address}."
    return f"Correct or remove {name}."


def _port_fixes(source: Source, name: str, line: int, text: str) -> list[Fix]:
    before = source.lines[line - 1]
    if name in _GRPC_PORTS and (port := _port_in(text)) and _is_plain(before):
        return [Fix(source.path, line, before, f"{name}={port}")]
    return []


def _is_plain(line: str) -> bool:
    """Return whether a line has neither escapes nor a continuation."""
    return "\\" not in line


def _lines(source: Source, file: ConfigFile) -> Iterator[Finding]:
    by_line: dict[int, list[str]] = {}
    for name, setting in file.settings.items():
        by_line.setdefault(setting.line, []).append(name)
    for line, names in by_line.items():
        if len(names) > 1:
            before = source.lines[line - 1]
            after = "\n".join(f"{name}={file.raw[name]}" for name in names)
            yield finding(
                "config-lines",
                Place(source.name, line),
                f"A line break is missing between {', '.join(names)}. marserve reads them as if "
                "it existed; TorchServe reads one setting with a wrong value.",
                "Insert the line break.",
                fixes=[Fix(source.path, line, before, after)] if _is_plain(before) else [],
            )
    for warning in file.warnings:
        if "Latin-1" in warning:
            yield finding("config-ignored", Place(source.name), warning, "Save the file as UTF-8.")


def _keys(source: Source, file: ConfigFile) -> Iterator[Finding]:
    harmless = [name for name in file.settings if name in HARMLESS]
    if harmless:
        fixes = [fix for name in harmless if (fix := _removal(source, file, name))]
        at = file.settings[harmless[0]].line
        yield finding(
            "config-no-effect",
            Place(source.name, at),
            f"Without effect: {', '.join(harmless)}.",
            "Nothing to do; you can remove them.",
            fixes=fixes,
        )
    for name, setting in file.settings.items():
        place = Place(source.name, setting.line)
        if name == "plugins_path":
            what = "plugins_path has no effect: there is no Java."
            do = "Remove it and the calls of the plugins' endpoints."
            yield finding("config-ignored", place, what, do)
        elif name == "debug" and setting.text.lower() == "true":
            yield finding(
                "config-refused", place, "debug=true has no effect.", "Use --debug-handler MODEL."
            )
        elif name not in KEYS.keys() | RECORDS | HARMLESS | {"debug"}:
            sentence = unread_key(name, "", KEYS).replace(" ()", "")
            yield finding("config-ignored", place, f"{sentence} TorchServe also ignores it.")


def _removal(source: Source, file: ConfigFile, name: str) -> Fix | None:
    line = file.settings[name].line
    text = source.lines[line - 1]
    is_alone = [each.line for each in file.settings.values()].count(line) == 1
    if not is_alone or not _is_plain(text) or not text.strip().startswith(name):
        return None
    return Fix(source.path, line, text, None)


def _settings(
    source: Source, file: ConfigFile, config: Config, around: Surroundings
) -> Iterator[Finding]:
    def place(name: str) -> Place:
        return Place(source.name, file.settings[name].line if name in file.settings else 0)

    if config.models:
        for sentence in unread_model_settings(file.settings["models"].text):
            yield finding("config-ignored", place("models"), f"{sentence} (as on TorchServe)")
    java = [option for option in config.vmargs if not LOG4J_FILE.fullmatch(option)]
    if java:
        fix = _removal(source, file, "vmargs") if len(java) == len(config.vmargs) else None
        yield finding(
            "config-no-effect",
            place("vmargs"),
            f"vmargs: {' '.join(java)} has no effect without a Java virtual machine.",
            "Nothing to do; you can remove it.",
            fixes=[fix] if fix else [],
        )
    if config.keystore_type == "JKS":
        entry = compatibility.find(_SECTION, "keystore_type")
        note = compatibility.reason(entry) if entry else ""
        yield finding("config-refused", place("keystore_type"), f"keystore_type=JKS: {note}.")
    if config.cpu_launcher_enable:
        yield finding(
            "cpu-launcher",
            place("cpu_launcher_enable"),
            "cpu_launcher_enable=true: if the launcher fails on the server's machine, workers "
            "start without being bound to cores, with a warning, as on TorchServe.",
            "Try it there: python -m torch.backends.xeon.run_cpu "
            f"{config.cpu_launcher_args or ''} --no_python hostname",
        )
    yield from _environment_ignored(source, config, around)
    yield from _tokens(place("inference_address"), source, config, around)
    yield from _grpc_and_stores(place, file, config, around)
    yield from _models(place, file, config)


def _environment_ignored(source: Source, config: Config, around: Surroundings) -> Iterator[Finding]:
    if config.enable_envvars_config:
        return
    for name in dict(around.beside(around.variables, source)):
        key = name.removeprefix("TS_").lower()
        if name != key.upper() and key in KEYS and name not in _ALWAYS_READ:
            yield finding(
                "environment-ignored",
                Place(source.name),
                f"{name} has no effect: the file does not set enable_envvars_config=true.",
                f"Add enable_envvars_config=true, or write {key} into the file.",
            )


def _tokens(
    place: Place, source: Source, config: Config, around: Surroundings
) -> Iterator[Finding]:
    by_variable = "TS_DISABLE_TOKEN_AUTHORIZATION" in around.environment(source)
    is_decided = config.disable_token_authorization is not None or (
        by_variable and config.enable_envvars_config
    )
    if config.is_private or is_decided or around.tokens_are_off(source):
        return
    listeners = [*config.listeners, *config.grpc_listeners]
    public = next(each.url for each in listeners if not each.is_private)
    yield finding(
        "tokens",
        place,
        f"Requests need a token, because {public} is not a loopback address and "
        "disable_token_authorization is not set, as on TorchServe since 0.11.1.",
        "Send the keys of key_file.json, or set disable_token_authorization=true behind a "
        "proxy that authenticates clients.",
    )


def _grpc_and_stores(
    place: Callable[[str], Place], file: ConfigFile, config: Config, around: Surroundings
) -> Iterator[Finding]:
    keys = [name for name in file.settings if name.startswith(("grpc_inf", "grpc_man"))]
    if keys and around.is_here and not is_installed("grpc"):
        yield finding(
            "grpc-extra",
            place(keys[0]),
            "gRPC is configured, but grpcio is not installed here.",
            "pip install grpcio grpcio-reflection protobuf",
        )
    if any(url.startswith("s3://") for url in config.load_models):
        yield finding(
            "s3-extra",
            place("load_models"),
            "load_models contains an archive in S3.",
            "pip install botocore, and allow it: allowed_urls=s3://.*",
        )


def _models(place: Callable[[str], Place], file: ConfigFile, config: Config) -> Iterator[Finding]:
    saved = config.model_snapshot
    if saved is not None:
        for each in saved:
            at = place("model_snapshot")
            yield from unbatched(at, each.name, each.values["size"], each.values["min_workers"])
    for name, versions in config.models.items() if saved is None else ():
        for members in versions.values():
            size, workers = members.get("batchSize", 1), members.get("minWorkers", 0)
            # A value that is not a number is measured by the server.
            if isinstance(size, int) and isinstance(workers, int):
                yield from unbatched(place("models"), name, size, workers)
    # A relative path depends on the working directory of the server, which is unknown.
    is_absolute = file.raw.get("model_store", "").startswith("/")
    is_store_here = is_absolute and config.model_store.is_dir()
    for model in saved or () if is_store_here else ():
        archive = config.model_store / model.url
        if not archive.exists():
            yield finding(
                "model-missing",
                place("model_snapshot"),
                f"{model.url} of {model.name} is not in {config.model_store}.",
                "Copy it there, or remove the model from model_snapshot.",
            )


def _variables(
    source: Source, file: ConfigFile, environ: _Environment, around: Surroundings
) -> Iterator[Finding]:
    # SageMaker's toolkit sets its variables.
    missing = [
        name
        for name in dict.fromkeys(environ.missing)
        if not (name.startswith("SAGEMAKER_") and around.is_on("sagemaker", source))
    ]
    if missing:
        at = next((file.settings[name].line for name, text in file.raw.items()
                   if f"$${missing[0]}$$" in text and name in file.settings), 0)  # fmt: skip
        yield finding(
            "config-variable",
            Place(source.name, at),
            f"The server needs these variables to start: {', '.join(missing)}.",
            "Set them in the environment of the server.",
        )


def _paths(source: Source, file: ConfigFile, config: Config) -> Iterator[Finding]:
    for name in _PATHS:
        path = None if "$$" in file.raw.get(name, "") else getattr(config, name)
        if name in ("model_store", "workflow_store"):
            is_there = path is None or path.is_dir()
        else:
            is_there = path is None or path.is_file()
        if not is_there:
            yield finding(
                "config-path",
                Place(source.name, source.line_of(name)),
                f"{name}: {path} does not exist.",
                "Create it or set another path, unless the file is for another machine.",
            )
