"""A setting of a model as a row, and the one reader of rows."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from marserve.frontend.configuration.setting_kinds import Kind, short_repr

#: Attributes of settings and their values; those that were not mentioned are absent.
Fields = Mapping[str, Any]

#: The sources of a setting that only model-config.yaml has.
YAML_ONLY = ("yaml",)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row.

    Attributes:
        attribute: Where its value is kept.
        key: Its name in yaml and JSON.
        kind: What it may be.
        help: One line for people.
        sources: Who may set it, the strongest first: request, yaml, models, server, default.
        name: What messages call it.
        parameter: Its name in requests; empty for none.
        other_key: As `key`, in another server; empty for none.
        as_configured: Numbers that TorchServe's clients send for "as configured" in a registration.
        is_live: Whether it can be changed while the model is served.
        is_strict: Whether a wrong value in model-config.yaml refuses the archive; of TorchServe's
            keys it only ever was a warning.
        server: The key of config.properties with the value for all models; empty for none.
        spread: Attributes that a value gives, where it is not the one.
    """

    attribute: str
    key: str
    kind: Kind
    help: str
    sources: Sequence[str]
    name: str
    parameter: str = ""
    other_key: str = ""
    as_configured: tuple[int, ...] = ()
    is_live: bool = False
    is_strict: bool = False
    server: str = ""
    spread: Callable[[Any], Fields] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All its names in yaml and JSON."""
        return tuple(filter(None, (self.key, self.other_key)))

    @property
    def parameters(self) -> tuple[str, ...]:
        """All its names in requests."""
        return tuple(filter(None, (self.parameter, _snake_case(self.other_key))))

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
    parameter = more.setdefault("parameter", _snake_case(key) if "request" in sources else "")
    row = {"key": key, "kind": kind, "help": text, "sources": sources, "name": parameter or key}
    return field(default_factory=lambda: default, metadata={"row": row | more})


def _snake_case(key: str) -> str:
    return re.sub("[A-Z]", r"_\g<0>", key).lower()


def rows_of(settings: type) -> tuple[Setting, ...]:
    """The rows of a dataclass, in the order of its fields."""
    found = [(each.name, each.metadata.get("row")) for each in fields(settings)]
    return tuple(Setting(attribute=name, **row) for name, row in found if row)


#: Is called with row, name and value of what cannot be used; it counts as absent after that.
OnWrong = Callable[[Setting, str, object], None]


def wrong_value(name: str, value: object, rule: str) -> str:
    """What is wrong with a value, as one sentence; a text is shown as it came."""
    text = value[:80] if isinstance(value, str) else short_repr(value)
    return f"{name}={text}: it is {rule}."


def refuse_value(row: Setting, name: str, value: object) -> NoReturn:
    """Say what is wrong with a value.

    Raises:
        ValueError: Always; names setting, value and rule.
    """
    raise ValueError(wrong_value(name, value, row.kind.rule))


def read_settings(
    rows: Iterable[Setting],
    values: Mapping[str, Any],
    on_wrong: OnWrong = refuse_value,
    names: Callable[[Setting], Sequence[str]] = lambda row: row.keys,
) -> Fields:
    """Read the settings in a mapping.

    Args:
        rows: Those to look for.
        values: By name; None counts as absent.
        on_wrong: What to do about a value that cannot be used.
        names: What a setting is called there.

    Raises:
        ValueError: Two names of a setting have different values.
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
