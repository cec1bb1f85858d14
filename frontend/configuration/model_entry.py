"""What a source says about a model version: ``models=``, a snapshot, a catalog, a request.

Their members have the same names. The rows that a source passes to `read_settings`, the names of
rows and what happens to wrong values decide how strict it is:

    ``models=``  texts may be numbers; unknown members and wrong numbers of TorchServe's are ignored
                 with a warning, other wrong values stop the start. The members are kept as they
                 are and read when the model is registered (`models_key`).
    snapshot     texts may be numbers and switches; unknown members are ignored (`saved_models`)
    catalog      everything that is not understood refuses the model (`catalog.document`)
    request      texts may be numbers; unknown members are reported (`operations.model_parameters`)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from marserve.backend.manifest import RUNTIMES
from marserve.frontend.configuration.setting import (
    Fields,
    Names,
    OnWrong,
    Setting,
    read_settings,
)
from marserve.frontend.configuration.setting_kinds import Kind, word

#: TorchServe's members in ``models=`` and in snapshots: numbers.
TORCHSERVES = (
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "responseTimeout",
    "startupTimeout",
)
#: The kind of ``runtimeType``, which replaces the manifest's.
RUNTIME = word(*RUNTIMES)
_WORKERS = ("min_workers", "max_workers")
_MORE = Kind("a whole number, minWorkers or more", lambda _: False)


def member(key: str, kind: Kind, attribute: str = "") -> Setting:
    """Return the row of a member that is not a setting, or has another kind than the setting."""
    return Setting(attribute=attribute or key, key=key, name=key, kind=kind)


@dataclass(frozen=True)
class ModelEntry:
    """What a source says about a model version; empty values leave the choice to others."""

    url: str  # name in the model store, path of a directory, or URL
    name: str = ""
    version: str = ""
    handler: str = ""
    runtime: str = ""
    s3_sse_kms: bool = False  # whether an http(s) URL leads to S3 and needs AWS credentials
    workers: tuple[int, int] | None = None  # minimum and maximum
    settings: Fields = field(default_factory=dict)  # others, by attribute of `model_schema`
    is_default: bool = field(default=False, compare=False)  # whether it is the model's default
    # Of snapshots
    parallel_level: int = 0
    set_by_requests: tuple[str, ...] = ()  # keys of settings
    batch_costs: tuple[tuple[float, float, int], ...] = ()  # size, seconds, number of batches

    @property
    def values(self) -> dict[str, Any]:
        """The settings with the numbers of workers, by attribute."""
        return {**self.settings, **dict(zip(_WORKERS, self.workers or (), strict=False))}


def read_entry(
    rows: Iterable[Setting],
    members: Mapping[str, Any],
    on_wrong: OnWrong,
    names: Names,
    **more: Any,
) -> ModelEntry:
    """Return the entry with these members, as `read_settings`; ``more`` are attributes."""
    found = dict(read_settings(rows, members, on_wrong, names))
    low, high = (found.pop(name, None) for name in _WORKERS)
    if low is not None and high is not None and high < low:
        on_wrong(member("maxWorkers", _MORE), "maxWorkers", high)
    own = {each.name: found.pop(each.name) for each in fields(ModelEntry) if each.name in found}
    workers = None if low is None else (low, low if high is None else high)
    return ModelEntry(**own, **more, workers=workers, settings=found)
