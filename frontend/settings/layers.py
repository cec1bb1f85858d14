"""Layers of settings: each is a source and the values that it sets.

Foreign settings (`other_servers`) set values below those of their own layer, and replace the
foreign settings of all weaker layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from marserve.frontend.batching.options import with_implied
from marserve.frontend.configuration.model_schema import SETTINGS, BatchingValues
from marserve.frontend.configuration.other_servers import FOREIGN, meanings
from marserve.frontend.configuration.setting import Fields, Setting

#: A source and the values that it sets.
Layer = tuple[str, Fields]

#: Sources, as `ModelSettings.origins` has them.
SERVER, REQUEST, MODELS, YAML = "server", "request", "models", "yaml"
CATALOG, SNAPSHOT = "catalog", "snapshot"
#: The names of settings in messages, by attribute.
NAMES = {
    **{row.attribute: row.name for row in SETTINGS},
    "is_automatic": "batch_size",
    "is_queue_bounded": "job_queue_size",
}
#: The sources in which a registration or change has set something.
CHOSEN = (REQUEST, CATALOG, SNAPSHOT)
_BATCHING = frozenset(each.name for each in fields(BatchingValues))


def with_foreign(layers: Sequence[Layer]) -> Iterator[Layer]:
    """Yield the layers, with what the strongest foreign settings set as layers below theirs."""
    strongest = max(
        (index for index, (_, values) in enumerate(layers) if FOREIGN & values.keys()), default=-1
    )
    for index, (origin, values) in enumerate(layers):
        if index == strongest:
            yield from meanings(values)
            yield origin, values
        else:
            yield origin, {name: values[name] for name in values if name not in FOREIGN}


def merged(earlier: Fields, changes: Fields) -> Fields:
    """Return the settings of one source after a change; None as a value: no longer set.

    Its foreign settings replace earlier ones, and the earlier values of what they set.
    """
    if any(changes.get(name) is not None for name in FOREIGN):
        replaced = {NAMES[name] for _, values in meanings(changes) for name in values}
        earlier = {
            name: value
            for name, value in earlier.items()
            if name not in FOREIGN and NAMES[name] not in replaced
        }
    values = {**earlier, **with_implied(changes)}
    return {name: value for name, value in values.items() if value is not None}


def attributes_of(rows: Iterable[Setting]) -> list[str]:
    """Return the attributes that rows set; some set two."""
    names = {row.name for row in rows}
    return [attribute for attribute, name in NAMES.items() if name in names]


def split_batching(values: Fields) -> tuple[Fields, Fields]:
    """Return the values of batching, and the others."""
    of_batching = {name: value for name, value in values.items() if name in _BATCHING}
    return of_batching, {name: values[name] for name in values if name not in _BATCHING}


def split_chosen(layers: Sequence[Layer]) -> tuple[list[Layer], Fields]:
    """Return layers without the batching that requests, a catalog or a snapshot set, and that."""
    below: list[Layer] = []
    chosen: Fields = {}
    for origin, values in layers:
        if origin in CHOSEN:
            of_batching, others = split_batching(values)
            chosen = merged(chosen, of_batching)
            below += [(origin, others)] if others else []
        else:
            below.append((origin, values))
    return below, chosen
