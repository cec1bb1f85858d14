"""Sentences about keys that are not read: TorchServe's, and those similar to a known one."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from marserve.frontend.configuration.model_schema import BY_KEY, BY_SPELLING, TorchRun
from marserve.frontend.configuration.other_servers import (
    BATCH_DEVICE,
    BATCHING_SECTION,
    DEVICE,
    FOREIGN_NAMES,
    SECTION,
)
from marserve.frontend.configuration.setting import camel_case, rows_of, snake_case
from marserve.frontend.configuration.setting_kinds import short_repr

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

#: Every key of a setting in model-config.yaml.
YAML_KEYS = tuple(BY_SPELLING)
#: Our sections of model-config.yaml, by their paths, and their keys. `BaseHandler` reads
#: ``optimization``.
YAML_SECTIONS: Mapping[str, Sequence[str]] = {
    SECTION: tuple(BATCHING_SECTION),
    "optimization": (
        "precision",
        "cast",
        "channels_last",
        "fold_batch_norm",
        "cuda_graphs",
        "device_stages",
        "check_accuracy",
    ),
    "optimization.check_accuracy": ("max_relative_error", "min_agreement", "samples"),
    "torchrun": tuple(row.key for row in rows_of(TorchRun)),
}
_WHOLE_SECTIONS = [path for path in YAML_SECTIONS if "." not in path]
#: All keys of model-config.yaml whose values are read or checked.
READ_YAML_KEYS = tuple(dict.fromkeys((*YAML_KEYS, *_WHOLE_SECTIONS, DEVICE)))
# Keys of our sections that handlers may have, too.
_COMMON = ("enabled", "samples")
# The section of each key, empty for the top level.
_PLACES = {
    **{key: path for path, keys in YAML_SECTIONS.items() for key in keys if key not in _COMMON},
    **dict.fromkeys((*YAML_KEYS, *_WHOLE_SECTIONS), ""),
}
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
_MIN_WORD = 3  # letters of a word that is cut off
_MAX_NAME = 40  # longer ones are not meant for one of ours
#: The predicate of a sentence about a parameter, which ends after it if nothing similar is known.
NOT_A_PARAMETER = "is not a parameter of this server"


def unread_key(name: str, place: str, known: Iterable[str]) -> str:
    """Return a sentence about a key that is not among the ``known`` ones."""
    if name in WITHOUT_EFFECT:
        return f"{name} ({place}) has no effect: {WITHOUT_EFFECT[name]}."
    return f"{name} ({place}) is an unknown key, ignored{_advice(name, known)}"


def unread_yaml_key(name: object, section: str = "") -> str:
    """Return a sentence about an unknown key of model-config.yaml, or of one of our sections in it.

    It is empty for known keys, and at the top level for keys that are not like one of ours: they
    are the handler's.
    """
    known = YAML_SECTIONS[section] if section else READ_YAML_KEYS
    if name in known:
        return ""
    advice = _yaml_advice(name, section) if isinstance(name, str) else ""
    if not advice and section:
        advice = f"its keys are {', '.join(known)}."
    return f"{_shown(name)} is no key that the server reads here; {advice}" if advice else ""


def _yaml_advice(name: str, section: str) -> str:
    if len(name) > _MAX_NAME:
        return ""
    if name in _OF_THE_SERVER:
        return "it counts in config.properties, for all models."
    if _plain(name) in ("workers", "initialworkers"):
        return "minWorkers and maxWorkers say how many workers there are."
    if other := foreign_name_hint(name):
        return other
    places = {**_PLACES, **dict.fromkeys(YAML_SECTIONS.get(section, ()), section)}
    meant = nearest(name, places)
    place = places.get(meant, section)
    if place == section:
        return f"did you mean {meant}?" if meant else ""
    where = f"in the section {place}" if place else "at the top level"
    return f"did you mean {meant} {where}?" if meant != name else f"it counts {where}."


def unread_parameter(name: str, known: Collection[str]) -> str:
    """Return a sentence about a parameter of a request that is not among the known ones."""
    advice = advice_for_model(name, known)
    if "worker" in name.lower() and (advice == "." or advice.endswith("model-config.yaml?")):
        advice = "; the workers are initial_workers, or later min_worker and max_worker."
    return f"{_shown(name)} {NOT_A_PARAMETER}{advice}"


def advice_for_model(name: str, known: Collection[str]) -> str:
    """Return the end of a sentence: where a name counts, or what is similar; else a full stop."""
    if len(name) > _MAX_NAME:
        return "."
    if other := foreign_name_hint(name):
        return f"; {other}"
    if name.lower() == DEVICE:
        return f"; {BATCH_DEVICE}."
    row = BY_SPELLING.get(name) or BY_SPELLING.get(camel_case(name))
    key = row.key if row else name
    if key in _PLACES and not (row and {*row.spellings, *row.parameters}.intersection(known)):
        return f"; {key} counts in {_place_of(key)}."
    if meant := nearest(name, known):
        return f"; did you mean {meant}?"
    meant = nearest(name, _PLACES)
    return f"; did you mean {meant} in {_place_of(meant)}?" if meant else "."


def _place_of(key: str) -> str:
    section = _PLACES[key]
    return f"the section {section} of model-config.yaml" if section else "model-config.yaml"


def foreign_name_hint(name: str) -> str:
    """Return the meaning here of a setting of another server; empty for other names.

    OpenVINO's files have names in upper case.
    """
    sentence = FOREIGN_NAMES.get(name.lower() if name.isupper() else snake_case(name), "")
    return sentence and f"{sentence}."


def _shown(name: object) -> str:
    if not isinstance(name, str):
        return short_repr(name)
    return name if name.isprintable() and len(name) <= _MAX_NAME else ascii(name[:_MAX_NAME])


@lru_cache(maxsize=512)  # above the number of known names
def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name with nearly the same letters or abbreviated words; empty for none."""
    names = {_plain(key): key for key in known}
    alike = difflib.get_close_matches(_plain(name), names, n=1, cutoff=_MIN_RATIO)
    if alike:
        return names[alike[0]]
    words = _words(name)
    return next((key for key in names.values() if _abbreviates(words, _words(key))), "")


@lru_cache(maxsize=512)
def _words(name: str) -> Sequence[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def _abbreviates(words: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether names have the same words, some of them cut off: batchDim, batch_dimension."""
    return len(words) == len(others) > 1 and all(
        min(len(word), len(other)) >= _MIN_WORD
        and (word.startswith(other) or other.startswith(word))
        for word, other in zip(words, others, strict=True)
    )


def _advice(name: str, known: Iterable[str]) -> str:
    bare = _plain(name)
    if other := foreign_name_hint(name):
        return f"; {other}"
    if meant := {_plain(key): key for key in known}.get(bare) or _MEANT.get(bare):
        return f"; did you mean {meant}?"
    for key in BY_KEY:
        if bare.removeprefix("default") == _plain(key):
            return _advice_for_models(key)
    meant = nearest(name, known)  # keys of the server may be longer than `_MAX_NAME`
    return f"; did you mean {meant}?" if meant else advice_for_model(name, ())


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
