"""A setting of a model as a row, and the one reader of rows.

What is read is what was said: attributes and values, with nothing for what nobody mentioned.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from marserve.frontend.configuration.setting_kinds import Kind, short_repr

#: Attributes of settings and their values: those that somebody mentioned.
Fields = Mapping[str, Any]

#: Who can say a setting that only the archive can say.
YAML_ONLY = ("yaml",)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row.

    Attributes:
        attribute: Where its value is kept.
        key: Its name in yaml and JSON.
        kind: What it may be.
        help: One line for people.
        sources: Who may say it, the strongest first: request, yaml, models, server, default.
        name: What people are told it is called.
        parameter: Its name in requests; empty for none.
        other_key: As `key`, in another server; empty for none.
        not_given: Numbers by which TorchServe's clients say nothing when they register a model.
        is_live: Whether it can be changed while the model is served.
        is_strict: Whether a wrong value in model-config.yaml refuses the archive; of TorchServe's
            keys it was never more than a word in the log.
        server: The key of config.properties that decides where nobody does; empty for none.
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
    not_given: tuple[int, ...] = ()
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
        """A yaml or JSON value as attributes.

        Raises:
            ValueError: It is not allowed; the text is the rule.
        """
        if not self.kind.accepts(value):
            raise ValueError(self.kind.rule)
        value = self.kind.read(value)
        return self.spread(value) if self.spread else {self.attribute: value}


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


#: Is told row, name and value of what cannot be used; the value counts as absent where it returns.
OnWrong = Callable[[Setting, str, object], None]


def wrong_value(name: str, value: object, rule: str) -> str:
    """What is wrong with a value, as one sentence; a text is shown as it came."""
    text = value[:80] if isinstance(value, str) else short_repr(value)
    return f"{name}={text}: it is {rule}."


def refuse_value(row: Setting, name: str, value: object) -> NoReturn:
    """Say what is wrong with a value.

    Raises:
        ValueError: Always; names field, value and rule.
    """
    raise ValueError(wrong_value(name, value, row.kind.rule))


def read_settings(
    rows: Iterable[Setting], values: Mapping[str, Any], on_wrong: OnWrong = refuse_value
) -> Fields:
    """Read the settings in a yaml or JSON object.

    Args:
        rows: Those to look for.
        values: By key; null counts as absent.
        on_wrong: Told of a value that cannot be used.

    Raises:
        ValueError: Two names of a setting say different things.
    """
    found: dict[str, Any] = {}
    for row in rows:
        found |= read_setting(row, row.keys, values, on_wrong)
    return found


def read_setting(
    row: Setting, names: Iterable[str], values: Mapping[str, Any], on_wrong: OnWrong = refuse_value
) -> Fields:
    """What one setting is, under whichever of its names; empty where nothing is said.

    Raises:
        ValueError: Two names say different things.
    """
    found: dict[str, Fields] = {}
    for name in names:
        value = values.get(name)
        if value is None:
            continue
        if row.kind.accepts(value):
            found[name] = row.read(value)
        else:
            on_wrong(row, name, value)
    first, *others = found.values() or ({},)
    if any(other != first for other in others):
        raise ValueError(f"{' and '.join(found)} are names of the same thing, and differ.")
    return first
