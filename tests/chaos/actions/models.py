"""Models change, several at a time; and archives lie."""

import asyncio
import io
import json
import signal
import stat
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import catalog_file

from chaos.actions.action import action
from chaos.actions.processes import send_signal
from chaos.clients import exchange, open_connection, plain_bytes
from chaos.rules import GONE, NO_STARTS, SCALED, WORKER_LOST
from chaos.served import Served, make_request
from chaos.world import MANAGEMENT_SECONDS, World, pick

#: Packed at the beginning; registered under other names.
CHURN = Served("churn", query={"batch_size": 4})
CHURN_ARCHIVES = {"1.0": "churn-1.mar", "2.0": "churn-2.mar"}
_CHANGED = (200, 202, 206, 404, 409)
_REGISTERED = (200, 202, 409)
# Workers that were asked for may fail to come up while others are killed.
_FAILED_LOAD = 500


def pack_churn(store: Path) -> None:
    """Make the archives that come and go."""
    for version, name in CHURN_ARCHIVES.items():
        CHURN.pack(store, version, name.removesuffix(".mar"))


@action(weight=2)
async def change_workers(world: World, rng: Random) -> str:
    """A model gets more workers, or fewer; it is put back in the end."""
    model, count = pick(rng, world.models), rng.randint(1, 3)
    synchronous = pick(rng, ("true", "false"))
    path = f"/models/{model.name}?min_worker={count}&max_worker={count}&synchronous={synchronous}"
    with world.timeline.fault(SCALED, model.name):
        answer = await world.manage("PUT", path, (*_CHANGED, _FAILED_LOAD))
    return f"{model.name} to {count}: {answer and answer.status}"


@action(weight=2)
async def change_batching(world: World, rng: Random) -> str:
    """Batches become larger or smaller, and wait longer or shorter."""
    model, size, delay = pick(rng, world.models[1:]), rng.randint(1, 16), rng.randint(0, 100)
    path = f"/models/{model.name}?batch_size={size}&max_batch_delay={delay}"
    answer = await world.manage("PUT", path, _CHANGED)
    return f"{model.name} to {size}, {delay} ms: {answer and answer.status}"


@action()
async def conflicting_changes(world: World, rng: Random) -> str:
    """Many at once want different things of the same model."""
    model, count = pick(rng, world.models), rng.randint(5, 15)
    paths = []
    for _ in range(count):
        workers, synchronous = rng.randint(1, 3), pick(rng, ("true", "false"))
        paths += [
            f"?min_worker={workers}&max_worker={workers}&synchronous={synchronous}",
            f"?batch_size={rng.randint(1, 8)}",
        ]
    allowed = (*_CHANGED, _FAILED_LOAD)
    with world.timeline.fault(SCALED, model.name):
        await asyncio.gather(
            *(world.manage("PUT", f"/models/{model.name}{path}", allowed) for path in paths)
        )
    return f"{len(paths)} of {model.name}"


@action(weight=2)
async def come_and_go(world: World, rng: Random) -> str:
    """A model is registered, gets a second version and a new default, and goes."""
    name = f"churn-{rng.getrandbits(32):08x}"
    model = replace(CHURN, name=name)
    statuses = []
    for version, archive in CHURN_ARCHIVES.items():
        path = f"/models?url={archive}&model_name={name}&initial_workers=1&synchronous=true"
        answer = await world.manage("POST", path, (*_REGISTERED, _FAILED_LOAD))
        statuses.append(answer and answer.status)
        if answer is None or answer.status != 200:
            break
        await _ask(world, model, rng)
        await world.manage("PUT", f"/models/{name}/{version}/set-default", (200,))
        await _ask(world, model, rng)
    with world.timeline.fault(GONE, name):
        asking = asyncio.create_task(_ask(world, model, rng))
        for version in ("1.0", "2.0"):  # the default goes last
            await world.manage("DELETE", f"/models/{name}/{version}", (200, 403, 404))
        await world.manage("DELETE", f"/models/{name}/1.0", (200, 404))
        await asking
    await world.manage("GET", f"/models/{name}", (404,))
    return f"{name}: {statuses}"


async def _ask(world: World, model: Served, rng: Random) -> None:
    connection = await open_connection(world)
    if connection is None:
        return
    try:
        requests = [make_request(model, world.token("churn"), rng) for _ in range(5)]
        await exchange(world, connection, requests, b"".join(map(plain_bytes, requests)))
    finally:
        connection.close()


@action(weight=2, is_exclusive=True)
async def edit_catalog(world: World, rng: Random) -> str:
    """A model comes, changes its version and goes by hand in the file that says what is served."""
    if world.catalog is None:
        return "there is none"
    name = f"edited-{rng.getrandbits(32):08x}"
    model = replace(CHURN, name=name)
    began = time.monotonic()
    for version, archive in CHURN_ARCHIVES.items():
        entry = {"url": archive, "minWorkers": 1}
        catalog_file.change(world.catalog, name, {version: entry})
        await _wait_for_version(world, name, version)
        await _ask(world, model, rng)
    with world.timeline.fault(GONE, name):
        asking = asyncio.create_task(_ask(world, model, rng))
        catalog_file.change(world.catalog, name, None)
        await _wait_for_version(world, name, "")
        await asking
    return f"{name} in {time.monotonic() - began:.1f} s"


async def _wait_for_version(world: World, name: str, version: str) -> None:
    """Wait until a model has exactly this version; none if it is empty."""
    deadline = time.monotonic() + MANAGEMENT_SECONDS
    found = None
    while time.monotonic() < deadline:
        answer = await world.manage("GET", f"/models/{name}/all")
        if answer is not None and answer.status in (200, 404):
            described = json.loads(answer.text) if answer.status == 200 else []
            found = [each["modelVersion"] for each in described]
            if found == ([version] if version else []):
                return
        await asyncio.sleep(0.1)
    world.referee.violation(f"the catalog wants {version or 'no version'} of {name}: {found}")


@action()
async def storm_over_one_name(world: World, rng: Random) -> str:
    """It is registered, changed and unregistered, all at the same time."""
    name, count = "storm", rng.randint(4, 10)
    allowed = (*_CHANGED, _FAILED_LOAD, 400, 403)
    orders = [
        ("POST", f"/models?url=churn-1.mar&model_name={name}&initial_workers=1&synchronous=true"),
        ("POST", f"/models?url=churn-2.mar&model_name={name}&initial_workers=1&synchronous=false"),
        ("PUT", f"/models/{name}?min_worker=2&max_worker=2&synchronous=true"),
        ("PUT", f"/models/{name}/2.0/set-default"),
        ("PUT", f"/models/{name}?batch_size=3"),
        ("DELETE", f"/models/{name}"),
        ("DELETE", f"/models/{name}/1.0"),
    ]
    chosen = [pick(rng, orders) for _ in range(count)]
    await asyncio.gather(*(world.manage(*order, allowed) for order in chosen))
    for _ in range(4):  # a registration that went on may come after a removal
        for version in ("/1.0", "/2.0", ""):
            await world.manage("DELETE", f"/models/{name}{version}", (200, 403, 404))
    await world.manage("GET", f"/models/{name}", (404,))
    return f"{count} changes"


# -- archives that lie -----------------------------------------------------------------------------


def _archive(manifest: object = None, **files: str | bytes) -> bytes:
    """An archive with a manifest, by default a good one, and the files."""
    manifest = manifest or {
        "runtime": "python",
        "model": {"modelName": "lie", "modelVersion": "1.0", "handler": "handler.py",
                  **({"configFile": "config.yaml"} if "config.yaml" in files else {})},
    }  # fmt: skip
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        archive.writestr("MAR-INF/MANIFEST.json", text)
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def _handler(source: str) -> bytes:
    return _archive(**{"handler.py": source})


def _config(text: str) -> bytes:
    good = "def handle(data, context):\n    return data\n"
    return _archive(**{"handler.py": good, "config.yaml": text})


def _merge_bomb() -> str:
    lines = ["a0: &b0 {x: 1}"]
    for level in range(1, 11):
        aliases = ", ".join([f"*b{level - 1}"] * 10)
        lines.append(f"a{level}: &b{level} {{<<: [{aliases}]}}")
    return "\n".join(lines)


def _link() -> bytes:
    content = io.BytesIO(_handler("import os\n"))
    with zipfile.ZipFile(content, "a") as archive:
        link = zipfile.ZipInfo("away")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    return content.getvalue()


LIES: dict[str, Callable[[], bytes]] = {
    "no archive": lambda: b"\x00\x01 this is no archive" * 100,
    "cut off": lambda: _handler("x = 1\n" * 1000)[:-50],
    "leaves its directory": lambda: _archive(**{"../../evil.py": "x", "handler.py": ""}),
    "a link": _link,
    "a manifest that is no JSON": lambda: _archive("{"),
    "a manifest of the wrong kind": lambda: _archive([1, 2]),
    "a manifest with wrong types": lambda: _archive({"model": {"modelName": 3, "handler": []}}),
    "a deep manifest": lambda: _archive("[" * 100_000),
    "grows a thousandfold": lambda: _archive(**{"handler.py": "", "zeros": bytes(80_000_000)}),
    "a merge bomb": lambda: _config(_merge_bomb()),
    "a deep config": lambda: _config("[" * 20_000),
}
#: Those that show only when a worker loads them.
LYING_HANDLERS: dict[str, Callable[[], bytes]] = {
    "a missing handler": lambda: _archive(),
    "raises when imported": lambda: _handler("raise ValueError\n"),
    "exits when imported": lambda: _handler("import os\nos._exit(1)\n"),
    "hangs when imported": lambda: _handler("import threading\nthreading.Event().wait()\n"),
}


@action(weight=3)
async def lying_archive(world: World, rng: Random) -> str:
    """An archive is not what it says: it is refused in time, and nothing of it stays."""
    lies = {**LIES, **LYING_HANDLERS}
    lie = pick(rng, [*lies])
    name = f"lie-{rng.getrandbits(32):08x}"
    path = world.server.store / f"{name}.mar"
    try:
        path.write_bytes(lies[lie]())
    except OSError as error:  # the disk is full
        path.unlink(missing_ok=True)
        return f"{lie}: {error}"
    try:
        query = f"url={path.name}&model_name={name}&initial_workers=1&synchronous=true"
        allowed = (400, 500) if lie in LYING_HANDLERS else (400,)
        answer = await world.manage("POST", f"/models?{query}&startup_timeout=5", allowed)
    finally:
        path.unlink()
    await world.manage("GET", f"/models/{name}", (404,))
    return f"{lie}: {answer and answer.status}"


@action()
async def register_while_workers_die(world: World, rng: Random) -> str:
    """A model comes while its first workers are killed; it is answered either way."""
    name = f"dying-{rng.getrandbits(32):08x}"
    with world.timeline.fault(WORKER_LOST, name), world.timeline.fault(NO_STARTS, name):
        query = f"url=churn-1.mar&model_name={name}&initial_workers=3&synchronous=true"
        registering = asyncio.create_task(world.manage("POST", f"/models?{query}"))
        for _ in range(3):
            await asyncio.sleep(rng.uniform(0, 0.05))
            described = await world.describe(name)
            for worker in described["workers"] if described else []:
                if worker.get("pid", 0) > 0:
                    send_signal(worker["pid"], signal.SIGKILL)
        answer = await registering
        await world.manage("DELETE", f"/models/{name}", (200, 404))
    return f"{answer and answer.status}"
