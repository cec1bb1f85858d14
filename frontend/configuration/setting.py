"""The row that describes a key of config.properties or a setting of a model; the reader of rows."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NoReturn

from marserve.frontend.configuration.setting_kinds import Kind, short_repr

#: Attributes of settings and their values; settings without a value are absent.
Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The description of one setting; an empty text means that it has none."""

    attribute: str  # of the settings object
    key: str  # its name in config.properties, or in yaml and JSON
    kind: Kind
    name: str  # in messages
    help: str = ""  # one line; of keys of config.properties the sample file has it
    #: Of a model's setting, strongest first: of request, yaml, models and server.
    sources: Sequence[str] = ()
    default: Any = None  # if no source sets it; of a key of config.properties, its text
    #: The text that counts instead of a wrong one where TorchServe starts; None stops the start.
    instead: str | None = None
    parameter: str = ""  # its name in requests
    other_key: str = ""  # as `key`, in another server
    as_configured: tuple[int, ...] = ()  # what TorchServe's clients register for "as configured"
    is_live: bool = False  # can be changed while the model is served
    #: Whether a wrong value in model-config.yaml refuses the archive; TorchServe's keys only warn.
    is_strict: bool = False
    server: str = ""  # the key of config.properties with the value for all models
    spread: Callable[[Any], Fields] | None = None  # a value to several attributes

    @property
    def keys(self) -> tuple[str, ...]:
        """All its names in yaml and JSON."""
        return tuple(filter(None, (self.key, self.other_key)))

    @cached_property
    def spellings(self) -> tuple[str, ...]:
        """All its names in yaml and JSON, those of requests included.

        TorchServe's own keys have no name in snake case: TorchServe did not read it, and an archive
        may have such a key for its handler. `unread_keys` warns of them.
        """
        own, *others = self.parameters or ("",)
        snake = [own or snake_case(self.key), *others] if self.is_strict else others
        return tuple(dict.fromkeys((*self.keys, *filter(None, snake))))

    @property
    def parameters(self) -> tuple[str, ...]:
        """All its names in requests."""
        return tuple(filter(None, (self.parameter, snake_case(self.other_key))))

    def from_text(self, text: str) -> Any:
        """Return the value of a text of config.properties; ValueError says what is allowed."""
        return self.kind.from_text(text) if text or self.default is not None else None

    def read(self, value: Any) -> Fields:
        """Return a value that its kind accepts, as attributes."""
        value = self.kind.read(value)
        return self.spread(value) if self.spread else {self.attribute: value}

    def write(self, values: Fields) -> Any:
        """Return its value, given those of all attributes, as in yaml and JSON."""
        value = values[self.attribute]
        return None if value is None else self.kind.write(value)


# Typed as the value instead of dataclasses.Field, like field() itself.
def setting(
    key: str, kind: Kind, default: Any, text: str, sources: Sequence[str] = ("yaml",), **more: Any
) -> Any:
    """Return a dataclass field with its `Setting`; in requests the key is in snake case."""
    parameter = more.setdefault("parameter", snake_case(key) if "request" in sources else "")
    row = {"key": key, "kind": kind, "help": text, "sources": sources, "name": parameter or key}
    row["default"] = default
    return field(default_factory=lambda: default, metadata={"row": row | more})


def snake_case(key: str) -> str:
    """Return a camel case key in snake case."""
    return re.sub("[A-Z]", r"_\g<0>", key).lower()


def camel_case(name: str) -> str:
    """Return a snake case name in camel case."""
    return re.sub("_([a-z])", lambda match: match[1].upper(), name)


def rows_of(settings: type) -> tuple[Setting, ...]:
    """Return the rows of a dataclass, in the order of its fields."""
    found = [(each.name, each.metadata.get("row")) for each in fields(settings)]
    names = ("attribute", "key", "name")
    return tuple(Setting(**{**dict.fromkeys(names, name), **row}) for name, row in found if row)


#: Returns the names of a row in a source.
Names = Callable[[Setting], Sequence[str]]
#: Called with row, name and value of a wrong value, which then counts as absent.
OnWrong = Callable[[Setting, str, object], None]


def wrong_value(name: str, value: object, rule: str) -> str:
    """Return one sentence about a wrong value."""
    text = value[:80] if isinstance(value, str) else short_repr(value)
    return f"{name}={text}: it is {rule}."


def refuse_value(row: Setting, name: str, value: object) -> NoReturn:
    """Raise ValueError with name, value and rule."""
    raise ValueError(wrong_value(name, value, row.kind.rule))


def read_settings(
    rows: Iterable[Setting],
    values: Mapping[str, Any],
    on_wrong: OnWrong = refuse_value,
    names: Names = lambda row: row.keys,
) -> Fields:
    """Return the settings in a mapping from ``names`` to values; None counts as absent.

    Raises:
        ValueError: Two names of a setting have different values, or ``on_wrong`` raises it.
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
            raise ValueError(f"{' and '.join(by_name)} are names of the same setting, and differ.")
        found |= first
    return found
