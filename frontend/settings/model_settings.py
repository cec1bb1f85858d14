"""Where each setting of a model comes from: the request, model-config.yaml, config.properties.

The order of the sources depends on the setting (`Setting.sources`), as in TorchServe, because
archives rely on it:

    batching             request > yaml > ``models=`` > server default (`batching_settings`)
    timeouts             yaml > ``models=`` > request > server default
    workers, registered  yaml pair > request > default_workers_per_model > 0
    workers, at start    yaml pair > ``models=`` > default_workers_per_model > GPUs > cores

The catalog wins over all of them.

Two differences from TorchServe: a yaml without timeouts does not replace those of the request and
the server by 120 s, and ``maxBatchDelay: 0`` in a yaml means 0, not "unset".
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.sequences.stateful_sequence import SequenceLimits
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_schema import (
    SETTINGS,
    Autoscaling,
    BatchingValues,
    ModelValues,
    TorchRun,
    read_with_foreign,
)
from marserve.frontend.configuration.saved_models import SAVED, SavedModel
from marserve.frontend.configuration.setting import Fields, read_settings, rows_of
from marserve.frontend.errors import ArchiveRefused, BadRequest
from marserve.frontend.settings.batching_settings import (
    SEQUENCES,
    Origins,
    change_batching,
    refusal,
    resolve_batching,
    restore_batching,
    sizes_to_validate,
)
from marserve.frontend.settings.model_yaml import (
    Warn,
    check_yaml,
    log_warning,
    yaml_settings,
)
from marserve.frontend.settings.parallel import Parallel

logger = logging.getLogger(__name__)

_BATCHING = frozenset(each.name for each in fields(BatchingValues))
_WORKERS = ("min_workers", "max_workers")
_NONE: Fields = {}
#: The origin of the settings of a catalog.
CATALOG = "catalog"


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ModelValues):
    """The resolved settings of a model version."""

    batching: Batching
    parallel: Parallel | None = None  # if a worker has several devices or processes
    #: Warnings about model-config.yaml for the client that registers the model.
    warnings: tuple[str, ...] = field(compare=False, default=())
    debugged: bool = False  # whether its only worker has the terminal
    origins: Origins = field(
        compare=False, default_factory=dict
    )  # of settings with several sources

    @property
    def mode(self) -> str:
        """The key by which requests are served without batches; empty for none."""
        return _mode(self.asynchronous, self.continuous_batching)

    @property
    def _batching_mode(self) -> str:
        return self.mode or (SEQUENCES if self.stateful else "")

    @property
    def worker_batching(self) -> Batching:
        """The batching of a worker: as set, except for stateful models with continuous batching.

        There a step may have twice the requests, as in TorchServe, so that a sequence whose answer
        is streamed can still be stopped.
        """
        if self.stateful and self.continuous_batching:
            return replace(self.batching, size=2 * self.batching.size)
        return self.batching

    @property
    def sequence_limits(self) -> SequenceLimits:
        """The limits of a stateful model; the sequences can fill the batches of all workers."""
        return SequenceLimits(
            max_idle=self.sequence_max_idle,
            max_age=self.sequence_timeout or math.inf,
            max_wait=self.response_timeout,
            max_sequences=max(self.max_sequences, self.batching.max_size * self.max_workers),
            max_queue=self.max_sequence_queue,
        )

    def slots_per_worker(self, min_workers: int) -> int:
        """Return the sequences of each worker, so that this number of workers can have all."""
        return math.ceil(self.sequence_limits.max_sequences / max(1, min_workers))

    @property
    def values(self) -> Fields:
        """All settings by attribute, batching included."""
        return {**vars(self), **vars(self.batching)}

    def for_debugging(self) -> "ModelSettings":
        """Return settings for a single worker that may wait at a breakpoint for any time."""
        return replace(
            self, min_workers=1, max_workers=1, autoscale=None, client_timeout=0.0, debugged=True
        )

    def changed(self, changes: Fields) -> "ModelSettings":
        """Return settings with the changes of a request; ValueError if they contradict others."""
        of_batching, others = _split(changes)
        batching, origins = change_batching(
            self.batching, self.origins, of_batching, self._batching_mode
        )
        if self.stateful and batching.splits_lists:
            raise ValueError(
                "dynamic_batch_size=true: the model is stateful (sequenceBatching), so that the "
                "items of a list would be of one sequence."
            )
        origins = {**origins, **dict.fromkeys(_names(others), "request")}
        return replace(self, **others, batching=batching, origins=origins)

    def restored(self, saved: SavedModel) -> "ModelSettings":
        """Return settings in which those of a snapshot win over every other source.

        Raises:
            ArchiveRefused: They contradict the archive, which may have changed.
        """
        of_batching, others = _split(_saved_settings(saved))
        others = {name: value for name, value in others.items() if value != getattr(self, name)}
        origins: Origins = {**self.origins, **dict.fromkeys(_names(others), "snapshot")}
        try:
            batching, origins = restore_batching(
                self.batching, origins, of_batching, self._batching_mode
            )
        except ValueError as error:
            raise ArchiveRefused(str(error)) from error
        return replace(self, **others, batching=batching, origins=origins)


def resolve_settings(
    requested: Fields,
    model_yaml: Mapping[str, Any],
    numbers: Mapping[str, Any],
    config: Config,
    *,
    gpus: int,
    default_workers: int,
    at_start: bool = False,
    catalog: Fields = _NONE,
) -> ModelSettings:
    """Resolve every setting of a model.

    Args:
        requested: The settings of the registration.
        model_yaml: The parsed model-config.yaml.
        numbers: The entry of the model in ``models=``.
        config: The configuration of the server.
        gpus: The number of GPUs.
        default_workers: The number of workers, unless yaml or, at start, ``models=`` sets it.
        at_start: Whether the model is loaded at start instead of by a request.
        catalog: The settings of the model in a catalog.

    Raises:
        ArchiveRefused, BadRequest: The settings contradict each other.
    """
    warnings: list[str] = []

    def warn(sentence: str) -> None:
        log_warning(sentence)
        warnings.append(sentence)

    from_yaml = yaml_settings(model_yaml, gpus, warn)
    mode = _mode(from_yaml.get("asynchronous"), from_yaml.get("continuous_batching"))
    sources = {
        CATALOG: catalog,
        "request": requested,
        "yaml": from_yaml,
        "models": models_settings(numbers),
        "server": server_settings(config, mode),
    }
    batching, batching_origins = resolve_batching(
        {origin: _split(found)[0] for origin, found in sources.items()},
        mode or (SEQUENCES if from_yaml.get("stateful") else ""),
    )
    if at_start:
        low = sources["models"].get("min_workers", default_workers)
        workers, by = (low, max(low, sources["models"].get("max_workers", low))), "models"
    else:
        workers, by = (default_workers, default_workers), "request"
    if pair := _workers_pair(from_yaml, warn):
        workers, by = pair, "yaml"
    if "min_workers" in catalog:
        workers, by = (catalog["min_workers"], catalog["max_workers"]), CATALOG
    values, origins = _strongest(sources)
    values |= zip(_WORKERS, workers, strict=True)
    may_scale = config.autoscale_workers and not values.get("stateful")
    values.setdefault("autoscale", Autoscaling() if may_scale else None)
    parallel = _parallel(from_yaml, list(model_yaml), warn)
    _check_stages(values, origins, mode, parallel)
    if values.get("validation"):
        _check_validation(values, mode, parallel)
        if not sizes_to_validate(batching):
            warn("validateBatching compares nothing: there are no batches with batch_size=1.")
    if values.get("stateful"):
        _check_sequences(values, batching)
    check_yaml(model_yaml, from_yaml, warn)
    return ModelSettings(
        **values,
        batching=batching,
        parallel=parallel,
        warnings=tuple(warnings),
        origins={"workers": by, **origins, **batching_origins},
    )


def models_settings(numbers: Mapping[str, Any]) -> Fields:
    """Return the settings in a model's entry of ``models=``, which were checked at start.

    Raises:
        BadRequest: Two names of one setting have different values.
    """
    try:
        return read_with_foreign([row for row in SETTINGS if "models" in row.sources], numbers)
    except ValueError as error:
        raise refusal("models", error) from error


def server_settings(config: Config, mode: str = "") -> Fields:
    """Return the server's defaults; without a batch policy for a mode without batches."""
    found = {row.attribute: getattr(config, row.server) for row in SETTINGS if row.server}
    if mode:
        del found["policy"]
    return {**found, "is_queue_bounded": "job_queue_size" in config.texts}


def _mode(asynchronous: object, continuous: object) -> str:
    if asynchronous:
        return "asyncCommunication"
    return "continuousBatching" if continuous else ""


def _split(found: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    of_batching = {name: value for name, value in found.items() if name in _BATCHING}
    return of_batching, {name: found[name] for name in found if name not in _BATCHING}


def _names(attributes: Mapping[str, Any]) -> list[str]:
    return sorted({row.name for row in SETTINGS if row.attribute in attributes})


def _saved_settings(saved: SavedModel) -> Fields:
    size = {} if saved.is_automatic else {"size": saved.batch_size}
    return {
        **size,
        "is_automatic": saved.is_automatic,
        "delay": saved.max_batch_delay,
        "min_workers": saved.min_workers,
        "max_workers": saved.max_workers,
        "response_timeout": saved.response_timeout,
        "startup_timeout": saved.startup_timeout,
        **read_settings(SAVED, saved.settings),
    }


def _strongest(sources: Mapping[str, Fields]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values and origins of all settings except workers and batching."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for row in rows_of(ModelValues):
        if row.attribute in _WORKERS:
            continue
        by_strength = (CATALOG, *row.sources)
        found = [origin for origin in by_strength if row.attribute in sources.get(origin, {})]
        if found:
            values[row.attribute] = sources[found[0]][row.attribute]
        if len(row.sources) > 1:
            origins[row.name] = found[0] if found else "default"
    return values, origins


def _workers_pair(from_yaml: Fields, warn: Warn) -> tuple[int, int] | None:
    low, high = (from_yaml.get(name) for name in _WORKERS)
    if low is not None and high is not None and high >= low:
        return low, high
    if low is not None or high is not None:
        warn("minWorkers needs a maxWorkers that is not less; both are ignored.")
    return None


def _parallel(from_yaml: Fields, keys: Sequence[object], warn: Warn) -> Parallel | None:
    """Read ``parallelType`` with ``parallelLevel`` or ``torchrun``; the later one counts."""
    kind, level = from_yaml.get("parallel_type"), from_yaml.get("parallel_level", 0)
    torchrun: TorchRun | None = from_yaml.get("torchrun")
    if torchrun and (not level or keys.index("torchrun") > keys.index("parallelLevel")):
        level = torchrun.processes
    if kind and level:
        return Parallel(kind, level, torchrun or TorchRun(processes=level))
    if kind or level:
        warn("model-config.yaml: parallelType and parallelLevel have no effect without each other.")
    return None


def _check_stages(
    values: dict[str, Any], origins: Mapping[str, str], mode: str, parallel: Parallel | None
) -> None:
    """Refuse stages or outstanding batches in modes that cannot have them."""
    beside = mode
    if parallel and parallel.has_ranks:  # each would have to run the stages in the same order
        beside = f"parallelType={parallel.type}"
    outstanding = values.get("outstanding_batches") or 1
    if values.get("stack_inputs") and mode:
        raise ArchiveRefused(
            f"model-config.yaml: stackInputs has no meaning beside {mode}, which forms no batches."
        )
    if values.get("overlap_stages") and beside:
        text = "overlapStages: true"
    elif outstanding > 1 and mode == "continuousBatching":
        if origins.get("outstanding_batches") == "request":
            raise BadRequest(f"outstanding_batches={outstanding} has no meaning beside {mode}.")
        text, beside = f"outstandingBatches: {outstanding}", mode
    else:
        return
    raise ArchiveRefused(f"model-config.yaml: {text} has no meaning beside {beside}.")


def _check_validation(values: Mapping[str, Any], mode: str, parallel: Parallel | None) -> None:
    """Refuse the validation of batches in modes without batches."""
    beside = mode
    if values.get("stateful"):
        beside = "sequenceBatching"
    elif parallel and parallel.has_ranks:
        beside = f"parallelType={parallel.type}"
    if beside:
        raise BadRequest(f"validateBatching has no meaning beside {beside}.")


def _check_sequences(values: Mapping[str, Any], batching: Batching) -> None:
    """Refuse a stateful model whose settings contradict sequences."""
    obstacles = {
        "sequenceMaxIdleMSec is 1 or more: the time after which an idle sequence ends": (
            not values.get("sequence_max_idle")
        ),
        "overlapStages is false: the stages of its requests must follow each other": (
            values.get("overlap_stages")
        ),
        "dynamicBatchSize is false: the items of a list would be of one sequence": (
            batching.splits_lists
        ),
        "autoscale is false: when a worker stops, its sequences end": values.get("autoscale"),
    }
    for rule, is_broken in obstacles.items():
        if is_broken:
            raise ArchiveRefused(f"model-config.yaml: beside sequenceBatching: true {rule}.")
