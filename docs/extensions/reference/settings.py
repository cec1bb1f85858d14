"""Keys of the properties file, settings of models and environment variables."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.loading import environment_variables
from marserve.frontend.configuration.model_schema import BATCHING, SETTINGS, TorchRun
from marserve.frontend.configuration.other_servers import FOREIGN_SETTINGS
from marserve.frontend.configuration.setting import Setting, rows_of
from reference.markdown import anchored, code, definition, linked, sentence, table

_SAMPLE = Path(__file__).parents[3] / "config.properties"
_HEADING = re.compile(r"# --- (.+?) -+")
_KEY = re.compile(r"#?([a-z_]+)=(.*)")
_KEYS_PAGE = "configuration.md"
_OURS = "(marserve)"


def configuration_keys() -> str:
    """Return each key with its default and its comment in the sample configuration."""
    found: list[str] = []
    for block in _SAMPLE.read_text(encoding="utf-8").split("\n\n"):
        words: list[str] = []
        keys: list[str] = []
        for line in block.splitlines():
            if heading := _HEADING.fullmatch(line):
                found.append(f"## {heading[1]}\n")
            elif key := _KEY.fullmatch(line):
                keys.append(_key(*key.groups()))
            else:
                words.append(line.removeprefix("#").strip())
        if keys:
            text = " ".join(words)
            ours = "*New.* " if _OURS in text else ""
            text = _escaped(text.replace(_OURS, "").strip())
            found.append(definition("<br>".join(keys), ours + text))
    return "\n".join(found)


def _key(name: str, value: str) -> str:
    default = KEYS[name].default
    shown = default if default is not None else value
    return anchored(name) + (f" = {code(shown)}" if shown else "")


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>\[\]$])", r"\\\1", text)


def environment() -> str:
    """Return a table of the variable of each key."""
    found = environment_variables()
    rows = ((code(found[key]), linked(key, _KEYS_PAGE)) for key in KEYS if key in found)
    return table(["Variable", "Key"], rows)


def model_settings() -> str:
    """Return each setting with its names in yaml, requests, ``models=`` and the file."""
    others = SETTINGS[len(BATCHING) :]
    return "\n".join(
        [
            *_section("Batches and queues", BATCHING[len(FOREIGN_SETTINGS) :]),
            *_section("Workers and other settings", others),
            *_section("Members of `torchrun`", rows_of(TorchRun)),
            *_section("Settings of other servers", FOREIGN_SETTINGS),
        ]
    )


def _section(heading: str, rows: Iterable[Setting]) -> Iterator[str]:
    yield f"## {heading}\n"
    for row in rows:
        others = [f"also {code(name)}" for name in row.keys[1:]]
        yield definition(
            " · ".join([anchored(row.key), *others]),
            sentence(f"{row.help} {sentence(row.kind.rule)}{_default(row)}"),
            " · ".join(_dialects(row)),
        )


def _default(row: Setting) -> str:
    value = row.write({row.attribute: row.default})
    if row.server or value in (None, "", {}, []):
        return ""
    return f" Default: {code(json.dumps(value))}."


def _dialects(row: Setting) -> Iterator[str]:
    if row.parameters:
        live = ", also while it is served" if row.is_live else ""
        yield f"requests: {', '.join(map(code, row.parameters))}{live}"
    if "models" in row.sources:
        yield "member of `models=`"
    if row.server:
        yield f"for all models: {linked(row.server, _KEYS_PAGE)}"
