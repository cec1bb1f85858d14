"""A setting of a model as a row, and the one reader of rows."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NoReturn

from marserve.frontend.configuration.setting_kinds import Kind, short_repr

#: Attributes of settings and their values; those that were not mentioned are absent.
Fields = Mapping[str, Any]

#: The sources of a setting that only model-config.yaml has.
YAML_ONLY = ("yaml",)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row; an empty text is none."""

    attribute: str  # where its value is kept
    key: str  # its name in yaml and JSON
    kind: Kind
    help: str  # one line for people
    sources: Sequence[str]  # strongest first: of request, yaml, models, server and default
    name: str  # what messages call it
    parameter: str = ""  # its name in requests
    other_key: str = ""  # as `key`, in another server
    as_configured: tuple[int, ...] = ()  # what TorchServe's clients register for "as configured"
    may_be_none: bool = False  # where nobody has set it
    is_live: bool = False  # can be changed while the model is served
    #: A wrong value in model-config.yaml refuses the archive; TorchServe's keys only ever warned.
    is_strict: bool = False
    server: str = ""  # the key of config.properties with the value for all models
    spread: Callable[[Any], Fields] | None = None  # attributes of a value, where it is not one

    @property
    def keys(self) -> tuple[str, ...]:
        """All its names in yaml and JSON."""
        return tuple(filter(None, (self.key, self.other_key)))

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """All that yaml and JSON may write it as: also as requests do.

        Not so TorchServe's own keys: it never read them in snake case, and an archive may have such
        a key for its handler. Those are only told of (`unread_keys`).
        """
        own, *others = self.parameters or ("",)
        snake = [own or snake_case(self.key), *others] if self.is_strict else others
        return tuple(dict.fromkeys((*self.keys, *filter(None, snake))))

    @property
    def parameters(self) -> tuple[str, ...]:
        """All its names in requests."""
        return tuple(filter(None, (self.parameter, snake_case(self.other_key))))

    def read(self, value: Any) -> Fields:
        """A value that its kind accepts, as attributes."""
        value = self.kind.read(value)
        return self.spread(value) if self.spread else {self.attribute: value}

    def write(self, values: Fields) -> Any:
        """Its value among those of all attributes, as yaml and JSON have it; None for none."""
        value = values[self.attribute]
        return None if value is None else self.kind.write(value)


# Typed as the value rather than as the dataclasses.Field it is, as field() itself is.
def setting(
    key: str, kind: Kind, default: Any, text: str, sources: Sequence[str] = YAML_ONLY, **more: Any
) -> Any:
    """A field of a dataclass, with its row: see `Setting`; requests have the key in snake case."""
    parameter = more.setdefault("parameter", snake_case(key) if "request" in sources else "")
    row = {"key": key, "kind": kind, "help": text, "sources": sources, "name": parameter or key}
    row["may_be_none"] = default is None
    return field(default_factory=lambda: default, metadata={"row": row | more})


def snake_case(key: str) -> str:
    """A key of yaml and JSON as requests have it."""
    return re.sub("[A-Z]", r"_\g<0>", key).lower()


def camel_case(name: str) -> str:
    """The reverse of `snake_case`."""
    return re.sub("_([a-z])", lambda match: match[1].upper(), name)


def rows_of(settings: type) -> tuple[Setting, ...]:
    """The rows of a dataclass, in the order of its fields."""
    found = [(each.name, each.metadata.get("row")) for each in fields(settings)]
    return tuple(Setting(attribute=name, **row) for name, row in found if row)


#: Is called with row, name and value of what cannot be used; then it counts as absent.
OnWrong = Callable[[Setting, str, object], None]


def wrong_value(name: str, value: object, rule: str) -> str:
    """What is wrong with a value, as one sentence; a text is shown as it came."""
    text = value[:80] if isinstance(value, str) else short_repr(value)
    return f"{name}={text}: it is {rule}."


def refuse_value(row: Setting, name: str, value: object) -> NoReturn:
    """Raise ValueError: name, value and rule as one sentence."""
    raise ValueError(wrong_value(name, value, row.kind.rule))


def read_settings(
    rows: Iterable[Setting],
    values: Mapping[str, Any],
    on_wrong: OnWrong = refuse_value,
    names: Callable[[Setting], Sequence[str]] = lambda row: row.keys,
) -> Fields:
    """The settings in a mapping from ``names`` to values, of which None counts as absent.

    Raises:
        ValueError: Two names of a setting have different values, or see ``on_wrong``.
    """
    found: dict[str, Any] = {}
    for row in rows:
        by_name: dict[str, Fields] = {}
        for name in names(row):
            if (value := values.get(name)) is None:
                continue
            if row.kind.accepts(value):
                by_name[name] = row.read(value)
            else:
                on_wrong(row, name, value)
        first, *others = by_name.values() or ({},)
        if any(other != first for other in others):
            raise ValueError(f"{' and '.join(by_name)} are names of the same thing, and differ.")
        found |= first
    return found
