"""Clients of operators: pages of the dashboard, and readers of metrics and time lines."""

import asyncio
import json
import time
from collections.abc import Set as AbstractSet
from random import Random
from typing import Any
from urllib.parse import quote

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from chaos.clients import open_connection
from chaos.http_client import Connection, request_bytes
from chaos.rules import FRONTEND_DOWN, FRONTEND_STOPPED, NO_DESCRIPTORS, NOT_LOADED
from chaos.world import World, pick

#: Seconds without an event after which a page connects again: SILENCE of its connection.js.
_SILENCE = 6.0
#: Seconds for a page of metrics: engines have one of them, and others scrape at the same time.
_SCRAPE_SECONDS = 10.0
_LISTED = 50
_LISTS = ("models", "gone", "batches", "runs")  # of what is new, or has changed
_FORMATS = {"application/openmetrics-text": parse_open, "text/plain": parse_text}
Version = tuple[str, str]


class Page:
    """A page of the dashboard, which merges the events of the server as connection.js does.

    Attributes:
        models: The models that it shows, by name and version.
        last: When it received the last event.
    """

    def __init__(self, world: World) -> None:
        self.models: dict[Version, Any] = {}
        self.last = time.monotonic()
        self._world = world
        self._members: dict[str, dict[str, Any]] = {}  # by kind of the event
        self._batches: dict[str, int] = {}

    def read(self, received: bytearray) -> None:
        """Take the events that are complete."""
        *events, rest = bytes(received).split(b"\n\n")
        received[:] = rest
        for event in events:
            kind, _, data = event.decode().partition("\ndata: ")
            for problem in self._merge(kind.removeprefix("event: "), json.loads(data)):
                self._world.referee.violation(f"dashboard, {kind}: {problem}")
            self.last = time.monotonic()

    def _merge(self, kind: str, data: dict[str, Any]) -> list[str]:
        known = self._members.setdefault(kind, {})
        members = {name: data[name] for name in data if name not in _LISTS}
        same = [name for name in known if members.get(name, ...) == known[name]]
        found = [f"{name} is sent again" for name in same]
        if kind == "overview":
            if not known and {*data} != {"at", "server", "host", "problems", "models"}:
                found.append(f"the first has {[*data]}")
            found += self._merge_models(data["models"], [*map(tuple, data.get("gone", ()))])
        known |= members
        for batch in data.get("batches", ()):
            at = batch.pop("closedAt")  # by a wall clock that is read for each event
            if abs(self._batches.get(text := json.dumps(batch), 0) - at) <= 2:
                found.append(f"a batch twice: {text}")
            self._batches[text] = at
        return found

    def _merge_models(self, models: list[Any], gone: list[Version]) -> list[str]:
        changed = {(each["modelName"], each["modelVersion"]): each for each in models}
        same = [key for key in changed if self.models.get(key) == changed[key]]
        found = [f"{key} has not changed" for key in same]
        found += [f"{key} is gone and was not there" for key in {*gone} - self.models.keys()]
        self.models |= changed
        self.models = {key: self.models[key] for key in self.models.keys() - gone}
        missing = {(model.name, "1.0") for model in self._world.models} - self.models.keys()
        since = self.last - 2  # the first event may be old: the server looks each second
        if missing and not self._world.felt(FRONTEND_DOWN, NOT_LOADED, since=since):
            found.append(f"{missing} are missing")
        return found


async def keep_watching(world: World, pages: set[Page], rng: Random) -> None:
    """Open one page after the other until it is over; ``pages`` has the one that is read."""
    while not world.over.is_set():
        if (connection := await open_connection(world, "management")) is None:
            continue
        page = Page(world)
        try:
            await _watch(world, page, pages, connection, rng)
        finally:
            pages.discard(page)
            connection.close()
        await asyncio.sleep(rng.uniform(0, 1))


async def _watch(
    world: World, page: Page, pages: set[Page], connection: Connection, rng: Random
) -> None:
    model = pick(rng, (None, *world.models))
    reads = pick(rng, ("always", "always", "late", "never"))
    query = f"?model={model.name}" if model else ""
    until = page.last + 10 ** rng.uniform(-0.5, 1.7)
    connection.send(request_bytes("GET", f"/dashboard/events{query}"))
    if is_always := reads == "always":
        pages.add(page)
    while not world.over.is_set() and (time.monotonic() < until or (world.is_calm and is_always)):
        if not is_always:
            connection.pause_reading()
            await asyncio.sleep(rng.uniform(0.5, 4))
        if reads == "late":
            connection.resume_reading()
        await asyncio.sleep(0.1)
        page.read(connection.current.body)
        now = time.monotonic()
        silence = now - page.last - world.timeline.seconds(FRONTEND_STOPPED, page.last, now)
        if connection.is_closed or connection.has_answered:
            excuses = [FRONTEND_DOWN, NOT_LOADED]
            if not page.models:
                excuses += [FRONTEND_STOPPED, NO_DESCRIPTORS]  # see `rules`
            is_due = is_always or connection.has_answered
            if is_due and not world.felt(*excuses, since=page.last):
                world.referee.violation(f"dashboard{query}: ended, with {len(page.models)} models")
            return
        if is_always and silence > _SILENCE:
            world.referee.violation(f"dashboard{query}: no event for {silence:.1f} s")
            return


async def check_pages(world: World, pages: AbstractSet[Page]) -> None:
    """All pages that are read must soon show the models that are registered, all of them ready."""
    wrong: list[str] = []
    for _ in range(10):
        registered, wrong = await _registered(world), []
        for page in pages:
            nodes = {key for key in page.models if key[0].startswith("flow__")}
            if page.models.keys() - nodes != registered - nodes:
                wrong.append(f"{sorted(page.models)}")
            for model in world.models:
                workers = page.models.get((model.name, "1.0"), {}).get("workers", {})
                if workers.get("ready") != model.workers:
                    wrong.append(f"{model.name}: {workers}")
        if pages and not wrong:
            return
        await asyncio.sleep(1)
    world.referee.violation(f"{len(pages)} pages show {wrong}, and {sorted(registered)} is there")


async def _registered(world: World) -> set[Version]:
    found, answer = set(), await world.manage("GET", "/models?limit=1000", (200,))
    for listed in json.loads(answer.text)["models"] if answer else ():
        answer = await world.manage("GET", f"/models/{listed['modelName']}/all", (200,))
        described = json.loads(answer.text) if answer else ()
        found |= {(each["modelName"], each["modelVersion"]) for each in described}
    return found


async def keep_scraping(world: World, rng: Random) -> None:
    """Read metrics and time lines about each second, until it is over."""
    counters: dict[object, float] = {}
    while not world.over.is_set():
        await scrape(world, rng, counters)
        await _read_time_lines(world, rng)
        await asyncio.sleep(rng.uniform(0.5, 1.5))


async def scrape(world: World, rng: Random, counters: dict[object, float]) -> None:
    """Read the metrics in one of the formats: each series is there once, and no counter sinks.

    ``counters`` has the values of earlier scrapes.
    """
    kind, pid, names = pick(rng, [*_FORMATS]), world.pid, {model.name for model in world.models}
    answer = await world.manage(
        "GET", "/metrics", (200,), "metrics", headers=f"Accept: {kind}", seconds=_SCRAPE_SECONDS
    )
    if answer is None or answer.status != 200:
        return

    def read() -> list[str]:
        found, seen = [], set()
        for family in _FORMATS[kind](answer.text):
            for name, labels, value, *_ in family.samples:
                series = name, *sorted(labels.items())
                if series in seen:
                    found.append(f"{series} is there twice")
                seen.add(series)
                if family.type == "counter" and labels.get("model_name") in names:
                    if value < (last := counters.get((pid, series), 0)):
                        found.append(f"{series} was {last} and is {value}")
                    counters[pid, series] = value
        return found

    try:
        problems = await asyncio.to_thread(read)
    except ValueError as error:
        problems = [f"it cannot be parsed: {error}"]
    for problem in problems:
        world.referee.violation(f"/metrics, {kind}: {problem}")


async def _read_time_lines(world: World, rng: Random) -> None:
    kind = pick(rng, ("slowest", "failed"))
    answer = await world.manage("GET", f"/requests?{kind}={_LISTED}", (200,))
    lines = json.loads(answer.text)["requests"] if answer and answer.status == 200 else []
    took = [line["tookMs"] for line in lines]
    if len(lines) > _LISTED or (kind == "slowest" and took != sorted(took, reverse=True)):
        world.referee.violation(f"/requests?{kind}: {took}")
    if lines:
        id_ = pick(rng, lines)["id"]
        answer = await world.manage("GET", f"/requests?id={quote(id_)}", (200, 404))
        found = json.loads(answer.text).get("requests", ()) if answer else ()
        if any(line["id"] != id_ for line in found):
            world.referee.violation(f"/requests?id={id_}: {found}")
