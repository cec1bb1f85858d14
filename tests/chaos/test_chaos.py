"""The campaign as a test; see the package."""

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from servers import Server

from chaos.actions import ACTIONS
from chaos.actions.clients import BODY_SECONDS, HEAD_SECONDS
from chaos.campaign import Campaign
from chaos.schedule import steps
from chaos.start import injected_environment
from chaos.world import World

_DISK_MIB = 128  # and for the logs of each second half of one more


@pytest.fixture
def folder():
    """A directory with a short path: that of an engine's socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        yield Path(folder)


@pytest.fixture
def disk(folder, pytestconfig):
    """A small file system of its own; None where none can be mounted."""
    mib = _DISK_MIB + round(pytestconfig.getoption("--chaos-seconds") / 2)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "chaos", str(folder)]
    can_mount = shutil.which("mount") and os.geteuid() == 0
    if not can_mount or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def seed(pytestconfig):
    """The seed of the run; with an odd one models are in a catalog, else in snapshots."""
    return int(pytestconfig.getoption("--chaos-seed") or random.randrange(1_000_000))


@pytest.fixture
def world(tmp_path, folder, disk, seed):
    """A server that is not started yet, on a disk of its own."""
    catalog = tmp_path / "catalog.json" if seed % 2 else None
    if catalog is not None:
        catalog.write_text('{"models": {}}')
    environment = injected_environment(tmp_path)
    directory = folder / "s"
    directory.mkdir()
    server = Server(
        directory,
        environment,
        {
            "request_head_timeout": str(HEAD_SECONDS),
            "request_body_timeout": str(BODY_SECONDS),
            "max_archive_size": "50000000",
            **({"model_catalog": str(catalog), "model_catalog_interval": "1"} if catalog else {}),
        },
    )
    try:
        yield World(server, tmp_path / "clock", disk, catalog)
    finally:
        server.close()


@pytest.mark.chaos
@pytest.mark.integration
def test_nothing_hangs_it_nothing_starves_it_nothing_stays_behind(
    world, seed, tmp_path, pytestconfig, capsys
):
    seconds = pytestconfig.getoption("--chaos-seconds")
    if not seconds:
        pytest.skip("--chaos-seconds=0")

    def say(text):
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    say(f"chaos: seed {seed}, {seconds:g} s; again with --chaos-seed {seed}")
    if world.disk is None:
        say("chaos: NO FILE SYSTEM CAN BE MOUNTED HERE: instead of a full disk, files cannot grow")
    campaign = Campaign(world, tmp_path / "tasks", seed, seconds)
    asyncio.run(campaign.run())
    violations = world.referee.violations
    if violations or pytestconfig.getoption("capture") == "no":
        say(campaign.report(with_journal=bool(violations)))
    if violations:
        with contextlib.suppress(OSError):
            log = world.server.log("ts_log.log")
            say(f"the end of ts_log.log:\n{log[-3_000:]}")
    assert not violations, f"{len(violations)} violations; again with --chaos-seed {seed}"


def test_the_schedule_is_a_function_of_the_seed():
    def first(seed):
        drawn = steps(seed, {name: action.weight for name, action in ACTIONS.items()})
        return [(step, step.rng.random()) for step, _ in zip(drawn, range(100), strict=False)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_every_action_occurs_before_one_occurs_more_often_than_it_should():
    weights = {name: action.weight for name, action in ACTIONS.items()}
    total = sum(weights.values())
    drawn = [step.action for step, _ in zip(steps(3, weights), range(2 * total), strict=False)]
    for bag in (drawn[:total], drawn[total:]):
        assert {name: bag.count(name) for name in weights} == weights
