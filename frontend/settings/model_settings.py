"""The settings of a model, resolved from layers.

From the weakest layer to the strongest:

    server     the keys of config.properties for all models
    request    of a registration: timeouts, and the workers unless the model is loaded at start
    models     the entry of the model in ``models=``; its workers count at start
    yaml       model-config.yaml; its workers count as a pair only
    request    of a registration: all other settings
    catalog    the entry of the model in a catalog
    snapshot   the settings of the model when the snapshot was written
    request    later changes

The order is TorchServe's, because archives rely on it. Two differences: a yaml without timeouts
does not replace those of the request and the server by 120 s, and ``maxBatchDelay: 0`` in a yaml
means 0, not "unset".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from marserve.frontend.batching.options import Batching, with_implied
from marserve.frontend.batching.sequences.stateful_sequence import SequenceLimits
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.configuration.model_schema import (
    SETTINGS,
    Autoscaling,
    ModelValues,
    TorchRun,
    read_consistent,
)
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.configuration.setting_kinds import REFUSE, WARN
from marserve.frontend.errors import ArchiveRefused, BadRequest, ServeError
from marserve.frontend.settings.batching_settings import (
    SEQUENCES,
    Origins,
    complete_batching,
    sizes_to_validate,
    with_size,
)
from marserve.frontend.settings.layers import (
    CATALOG,
    MODELS,
    NAMES,
    REQUEST,
    SERVER,
    SNAPSHOT,
    YAML,
    Layer,
    attributes_of,
    merged,
    split_batching,
    split_chosen,
    with_foreign,
)
from marserve.frontend.settings.model_yaml import Warn, check_yaml, log_warning, yaml_settings
from marserve.frontend.settings.parallel import Parallel

_WORKERS = ("min_workers", "max_workers")
_MODES = ("asynchronous", "continuous_batching", "stateful")
_SIZE = {"size", "is_automatic"}
#: Settings of a registration that yaml and ``models=`` replace.
_YIELDING = {row.attribute for row in SETTINGS if REQUEST in row.sources[1:]}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ModelValues):
    """The settings of a model version."""

    batching: Batching = field(default_factory=Batching)
    parallel: Parallel | None = None  # if a worker has several devices or processes
    #: Warnings about model-config.yaml for the client that registers the model.
    warnings: tuple[str, ...] = field(compare=False, default=())
    debugged: bool = False  # whether its only worker has the terminal
    origins: Origins = field(compare=False, default_factory=dict)
    layers: tuple[Layer, ...] = field(compare=False, default=())  # that the batching follows from

    @property
    def mode(self) -> str:
        """The key by which requests are served without batches; empty for none."""
        if self.asynchronous:
            return "asyncCommunication"
        return "continuousBatching" if self.continuous_batching else ""

    @property
    def has_ranks(self) -> bool:
        """Whether a worker is several processes."""
        return self.parallel is not None and self.parallel.has_ranks

    @property
    def worker_batching(self) -> Batching:
        """The batching of a worker."""
        if self.stateful and self.continuous_batching:
            # Twice the requests in a step, as in TorchServe: a sequence whose answer is streamed
            # can still be stopped.
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
        """Return settings for a single worker that may wait at a breakpoint for any time.

        Raises:
            ArchiveRefused: The worker is several processes, and there is one terminal.
        """
        if self.parallel and self.parallel.has_ranks:
            raise ArchiveRefused(
                f"parallelType={self.parallel.type}: its worker is several processes, which cannot "
                "be debugged in one terminal."
            )
        return replace(
            self, min_workers=1, max_workers=1, autoscale=None, client_timeout=0.0, debugged=True
        )

    def changed(self, changes: Fields) -> "ModelSettings":
        """Return settings with the changes of a request; ValueError if they contradict others."""
        below, chosen = split_chosen(self.layers)
        return self._with_batching([*below, (REQUEST, merged(chosen, changes))])

    def with_catalog(self, entry: Fields) -> "ModelSettings":
        """Return settings with the batching of a changed catalog; ValueError as `changed`."""
        below, _ = split_chosen(self.layers)
        of_batching, _ = split_batching(entry)
        return self._with_batching([*below, (CATALOG, of_batching)])

    def _with_batching(self, layers: Sequence[Layer]) -> "ModelSettings":
        found = self.with_layers(layers).completed()
        if self.stateful and found.batching.splits_lists:
            raise ValueError(
                "dynamic_batch_size=true: the model is stateful (sequenceBatching), so that the "
                "items of a list would be of one sequence."
            )
        return replace(self, batching=found.batching, origins=found.origins, layers=found.layers)

    def restored(self, saved: ModelEntry) -> "ModelSettings":
        """Return settings in which those of a snapshot win over every other source.

        Equal values change nothing unless a request had set them: a snapshot always has a size,
        even one that was derived.

        Raises:
            ArchiveRefused: They contradict the archive, which may have changed.
        """
        values = saved.values
        if values["is_automatic"]:
            del values["size"]  # it was measured
        kept = attributes_of(row for row in SETTINGS if row.key in saved.set_by_requests)
        differing = {name: value for name, value in values.items() if name in kept}
        for is_size in (False, True):
            settings = self.with_layers([*self.layers, (SNAPSHOT, differing)])
            batching = with_size(settings.batching, settings.origins)
            current = {**settings.values, **vars(batching)}
            differing |= {
                name: value
                for name, value in values.items()
                if (name in _SIZE) is is_size and value != current[name]
            }
        try:
            return self.with_layers([*self.layers, (SNAPSHOT, differing)]).completed()
        except ValueError as error:
            raise ArchiveRefused(str(error)) from error

    def with_layers(self, layers: Sequence[Layer]) -> "ModelSettings":
        """Return settings that follow from layers, the weakest first, except for derived ones."""
        start = replace(self, batching=Batching(), origins={})
        return replace(reduce(_with_layer, with_foreign(layers), start), layers=tuple(layers))

    def completed(self) -> "ModelSettings":
        """Return settings with those that follow from others; ValueError if any contradict."""
        mode = self.mode or (SEQUENCES if self.stateful else "")
        return replace(self, batching=complete_batching(self.batching, self.origins, mode))


def resolve(layers: Sequence[Layer], start: ModelSettings) -> ModelSettings:
    """Return the settings of the layers, the weakest first, for the mode that ``start`` has.

    Raises:
        BadRequest, ArchiveRefused: They contradict each other; the text names fields and values.
    """
    try:
        return start.with_layers(layers).completed()
    except ValueError as error:
        raise _refusal(_origin_of(layers, start, error), error) from error


def resolve_settings(
    requested: Fields,
    model_yaml: Mapping[str, Any],
    models_entry: Mapping[str, Any],
    config: Config,
    *,
    gpus: int,
    default_workers: int,
    at_start: bool = False,
    catalog: Fields | None = None,
) -> ModelSettings:
    """Resolve every setting of a model.

    Args:
        requested: The settings of the registration.
        model_yaml: The parsed model-config.yaml.
        models_entry: The entry of the model in ``models=``.
        config: The configuration of the server.
        gpus: The number of GPUs of the machine.
        default_workers: The workers of the registration, or at start those of the server.
        at_start: Whether the model is loaded at start instead of by a request.
        catalog: The entry of the model in a catalog.

    Raises:
        ArchiveRefused, BadRequest: The settings contradict each other.
    """
    warnings: list[str] = []

    def warn(sentence: str) -> None:
        log_warning(sentence)
        warnings.append(sentence)

    from_yaml = yaml_settings(model_yaml, gpus, warn)
    start = ModelSettings(**{name: from_yaml[name] for name in _MODES if name in from_yaml})
    models = models_settings(models_entry)
    yielding = {name: value for name, value in requested.items() if name in _YIELDING}
    low = high = default_workers
    if at_start:
        low = models.get("min_workers", low)
        high = max(low, models.get("max_workers", low))
    workers = {"min_workers": low, "max_workers": high}
    layers = [
        (SERVER, server_settings(config, start)),
        (REQUEST, yielding if at_start else {**yielding, **workers}),
        (MODELS, {**models, **workers} if at_start else _without_workers(models)),
        (YAML, from_yaml if _has_workers(from_yaml, warn) else _without_workers(from_yaml)),
        (REQUEST, {name: requested[name] for name in requested if name not in _YIELDING}),
        (CATALOG, catalog or {}),
    ]
    settings = resolve(layers, start)
    settings = replace(settings, parallel=_parallel(from_yaml, list(model_yaml), warn))
    _check_stages(settings)
    if settings.validation in (WARN, REFUSE):
        _check_validation(settings)
        if not sizes_to_validate(settings.batching):
            warn("validateBatching compares nothing: there are no batches with batch_size=1.")
    if settings.stateful:
        _check_sequences(settings)
    check_yaml(model_yaml, from_yaml, warn)
    return replace(settings, warnings=tuple(warnings))


def _with_layer(settings: ModelSettings, layer: Layer) -> ModelSettings:
    """Return settings with the values of a layer, and those that they imply."""
    origin, values = layer
    current = settings.values
    new = with_implied(values)
    of_batching, others = split_batching(new)
    decided = {
        NAMES[name]: origin
        for name, value in new.items()
        if name in values or value != current[name]
    }
    batching = replace(settings.batching, **of_batching)
    origins = {**settings.origins, **decided}
    return replace(settings, **others, batching=batching, origins=origins)


def _origin_of(layers: Sequence[Layer], start: ModelSettings, error: ValueError) -> str:
    """Return the origin of a contradiction: the weakest source that causes it."""
    found, _ = layers[-1]
    for count in range(len(layers) - 1, 0, -1):
        try:
            start.with_layers(layers[:count]).completed()
        except ValueError as earlier:
            if str(earlier) == str(error):
                found, _ = layers[count - 1]
                continue
        break
    return found


def _refusal(origin: str, error: ValueError) -> ServeError:
    if origin == YAML:
        return ArchiveRefused(f"model-config.yaml: {error}")
    if origin == MODELS:
        return BadRequest(f"models= in the configuration: {error}")
    if origin == CATALOG:
        return BadRequest(f"The catalog: {error}")
    return BadRequest(str(error))


def models_settings(entry: Mapping[str, Any]) -> Fields:
    """Return the settings in a model's entry of ``models=``, which were checked at start.

    Raises:
        BadRequest: Two names of one setting have different values.
    """
    try:
        return read_consistent([row for row in SETTINGS if MODELS in row.sources], entry)
    except ValueError as error:
        raise _refusal(MODELS, error) from error


def server_settings(config: Config, start: ModelSettings) -> Fields:
    """Return the server's defaults for a model with the mode of ``start``."""
    found = {row.attribute: getattr(config, row.server) for row in SETTINGS if row.server}
    if start.mode:
        del found["policy"]
    if config.autoscale_workers and not start.stateful:
        found["autoscale"] = Autoscaling()
    return {**found, "is_queue_bounded": "job_queue_size" in config.texts}


def _without_workers(values: Fields) -> Fields:
    return {name: value for name, value in values.items() if name not in _WORKERS}


def _has_workers(from_yaml: Fields, warn: Warn) -> bool:
    low, high = (from_yaml.get(name) for name in _WORKERS)
    if low is None and high is None:
        return False
    if low is None or high is None or high < low:
        warn("minWorkers needs a maxWorkers that is not less; both are ignored.")
        return False
    return True


def _parallel(from_yaml: Fields, keys: Sequence[object], warn: Warn) -> Parallel | None:
    """Read ``parallelType`` with ``parallelLevel`` or ``torchrun``; the later one counts."""
    kind, level = from_yaml.get("parallel_type"), from_yaml.get("parallel_level", 0)
    torchrun: TorchRun | None = from_yaml.get("torchrun")
    if torchrun and (not level or keys.index("torchrun") > keys.index("parallelLevel")):
        level = torchrun.processes
    if kind == "none":
        kind = ""
    if kind and level:
        return Parallel(kind, level, torchrun or TorchRun(processes=level))
    if kind or level:
        warn("model-config.yaml: parallelType and parallelLevel have no effect without each other.")
    return None


def _check_stages(settings: ModelSettings) -> None:
    mode, outstanding = settings.mode, settings.outstanding_batches or 1
    # Each rank would have to run the stages in the same order.
    beside = _ranks(settings) or mode
    if settings.stack_inputs and mode:
        raise ArchiveRefused(
            f"model-config.yaml: stackInputs has no meaning beside {mode}, which forms no batches."
        )
    if settings.overlap_stages and beside:
        raise ArchiveRefused(
            f"model-config.yaml: overlapStages: true has no meaning beside {beside}."
        )
    if outstanding > 1 and mode == "continuousBatching":
        if settings.origins["outstanding_batches"] == REQUEST:
            raise BadRequest(f"outstanding_batches={outstanding} has no meaning beside {mode}.")
        raise ArchiveRefused(
            f"model-config.yaml: outstandingBatches: {outstanding} has no meaning beside {mode}."
        )


def _check_validation(settings: ModelSettings) -> None:
    beside = SEQUENCES if settings.stateful else _ranks(settings) or settings.mode
    if beside:
        error = ValueError(f"validateBatching has no meaning beside {beside}.")
        raise _refusal(settings.origins["validate_batching"], error)


def _ranks(settings: ModelSettings) -> str:
    parallel = settings.parallel
    return f"parallelType={parallel.type}" if parallel and parallel.has_ranks else ""


def _check_sequences(settings: ModelSettings) -> None:
    obstacles = {
        "sequenceMaxIdleMSec is 1 or more: the time after which an idle sequence ends": (
            not settings.sequence_max_idle
        ),
        "overlapStages is false: the stages of its requests must follow each other": (
            settings.overlap_stages
        ),
        "dynamicBatchSize is false: the items of a list would be of one sequence": (
            settings.batching.splits_lists
        ),
        "openai is not embeddings or rerank: the items of a list would be of one sequence": (
            settings.openai in ("embeddings", "rerank")
        ),
        "autoscale is false: when a worker stops, its sequences end": settings.autoscale,
    }
    for rule, is_broken in obstacles.items():
        if is_broken:
            raise ArchiveRefused(f"model-config.yaml: beside sequenceBatching: true {rule}.")
