"""Sentences about keys that are not read: TorchServe's, and those similar to a known one."""

import difflib
import re
from collections.abc import Iterable

from marserve.frontend.configuration.model_schema import BY_KEY, BY_SPELLING
from marserve.frontend.configuration.other_servers import (
    BATCH_DEVICE,
    DEVICE,
    FOREIGN_NAMES,
    SECTION,
)
from marserve.frontend.configuration.setting import camel_case, snake_case

_JVM = "there is no Java virtual machine to set up"
_NETTY = "one event loop serves all connections"
#: Keys of TorchServe without a meaning here, and the reasons.
WITHOUT_EFFECT = {
    "NUM_WORKERS": "TorchServe did not read it, though KServe's examples have it",
    "cpp_log_config": "there is no C++ backend",
    "debug": "workers cannot be attached by hand, see --debug-handler",
    "io_ratio": _NETTY,
    "model_server_home": "the package knows where its own files are",
    "netty_client_threads": _NETTY,
    "number_of_netty_threads": _NETTY,
    "plugins_path": "Java plugins cannot be loaded",
    "prefer_direct_buffer": _JVM,
    "use_native_io": "workers are always reached over socket pairs",
}
#: Those of them that only tuned the Java server.
HARMLESS = WITHOUT_EFFECT.keys() - {"debug", "plugins_path"}
#: Keys of snapshots that are never read.
RECORDS = frozenset({"tsConfigFile", "version"})

#: Every key of a setting in model-config.yaml, and all keys whose values are read.
YAML_KEYS = tuple(BY_SPELLING)
READ_YAML_KEYS = (*YAML_KEYS, SECTION, DEVICE)
# Similar in meaning, not in letters.
_TRIED = {
    "default_workers_per_model": (
        "workers numworkers numberofworkers initialworkers defaultworkers workerspermodel "
        "minworker maxworker"
    ),
    "default_response_timeout": "timeout",
    "default_batch_policy": "batchpolicy",
    "job_queue_size": "queuesize",
    "inference_address": "port host address inferenceport",
    "management_address": "managementport",
    "metrics_address": "metricsport",
    "number_of_gpu": "gpus numgpus",
    "log_config": "loglevel logconfigfile",
    "disable_token_authorization": "enabletokenauthorization disabletokenauth",
}
_MEANT = {name: key for key, names in _TRIED.items() for name in names.split()}
# Keys of config.properties that people put into model-config.yaml.
_OF_THE_SERVER = (
    "default_workers_per_model",
    "default_response_timeout",
    "default_startup_timeout",
    "install_py_dep_per_model",
    "service_envelope",
    "number_of_gpu",
)
_MIN_RATIO = 0.85  # of difflib's ratio: a letter or two
_MAX_NAME = 40  # longer ones are not meant for one of ours
#: The predicate of a sentence about a parameter, which ends after it if nothing similar is known.
NOT_A_PARAMETER = "is not a parameter of this server"


def unread_key(name: str, place: str, known: Iterable[str]) -> str:
    """Return a sentence about a key that is not among the ``known`` ones."""
    if name in WITHOUT_EFFECT:
        return f"{name} ({place}) has no effect: {WITHOUT_EFFECT[name]}."
    return f"{name} ({place}) is an unknown key, ignored{_advice(name, known)}"


def unread_yaml_key(name: object, known: Iterable[str] = YAML_KEYS) -> str:
    """Return a sentence about a key of model-config.yaml that was probably meant for the server.

    It is empty for ``known`` keys, and for others, which are the handler's.
    """
    if not isinstance(name, str) or name in known or len(name) > _MAX_NAME:
        return ""
    unread = f"{name if name.isprintable() else ascii(name)} is no key that the server reads here"
    if name in _OF_THE_SERVER:
        return f"{unread}; it counts in config.properties, for all models."
    if _plain(name) in ("workers", "initialworkers"):
        return f"{unread}; minWorkers and maxWorkers say how many workers there are."
    meant = _nearest(name, known)
    advice = foreign_name_hint(name) or (f"did you mean {meant}?" if meant else "")
    return f"{unread}; {advice}" if advice else ""


def unread_parameter(name: str, known: Iterable[str]) -> str:
    """Return a sentence about a parameter of a request that is not among the known ones."""
    shown = name if name.isprintable() and len(name) <= _MAX_NAME else ascii(name[:_MAX_NAME])
    row = BY_SPELLING.get(name) or BY_SPELLING.get(camel_case(name))
    advice = advice_for_model(name, known)
    if row and not row.parameter:
        advice = f"; {row.key} counts in model-config.yaml."
    elif advice == "." and "worker" in name.lower():
        advice = "; the workers are initial_workers, or later min_worker and max_worker."
    return f"{shown} {NOT_A_PARAMETER}{advice}"


def advice_for_model(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: the name of a similar setting, else only a full stop."""
    if len(name) > _MAX_NAME:
        return "."
    if other := foreign_name_hint(name):
        return f"; {other}"
    return f"; {BATCH_DEVICE}." if name.lower() == DEVICE else _suggestion(name, known)


def foreign_name_hint(name: str) -> str:
    """Return the meaning here of a setting of another server; empty for other names.

    OpenVINO's files have names in upper case.
    """
    sentence = FOREIGN_NAMES.get(name.lower() if name.isupper() else snake_case(name), "")
    return sentence and f"{sentence}."


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _nearest(name: str, known: Iterable[str]) -> str:
    names = {_plain(key): key for key in known}
    alike = difflib.get_close_matches(_plain(name), names, n=1, cutoff=_MIN_RATIO)
    return names[alike[0]] if alike else ""


def _suggestion(name: str, known: Iterable[str]) -> str:
    meant = _nearest(name, known)
    return f"; did you mean {meant}?" if meant else "."


def _advice(name: str, known: Iterable[str]) -> str:
    bare = _plain(name)
    if other := foreign_name_hint(name):
        return f"; {other}"
    if meant := {_plain(key): key for key in known}.get(bare) or _MEANT.get(bare):
        return f"; did you mean {meant}?"
    for key in BY_KEY:
        if bare.removeprefix("default") == _plain(key):
            return _advice_for_models(key)
    return _suggestion(name, known)  # keys of the server may be longer than `_MAX_NAME`


def _advice_for_models(key: str) -> str:
    row = BY_KEY.get(key)
    places = [f"{key} in its model-config.yaml"]
    if row and "models" in row.sources:
        places.append(f'in models={{"NAME": {{"VERSION": {{"{key}": ...}}}}}}')
    if row and row.parameter and key == row.key:
        when = "registering" if "request" in row.sources else "scaling"
        places.append(f"as {row.parameter} when {when}")
    *firsts, last = places
    listed = f"{', '.join(firsts)} or {last}" if firsts else last
    return f": it is a setting of a model, given as {listed}."
