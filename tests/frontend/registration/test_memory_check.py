"""Whether there is memory for a model, with figures made up."""

import asyncio
from pathlib import Path

import pytest

from marserve.frontend.errors import NotEnoughMemory
from marserve.frontend.registration.memory_check import MemoryCheck, bytes_in

MEBIBYTE = 1 << 20


def check(percent: int, free: int) -> MemoryCheck:
    return MemoryCheck(percent, lambda: 100 * MEBIBYTE, lambda: free * MEBIBYTE)


@pytest.fixture
def model(tmp_path):
    """A model of 3 MiB, as a link to it."""
    (tmp_path / "files" / "code").mkdir(parents=True)
    (tmp_path / "files" / "model.pt").write_bytes(bytes(2 * MEBIBYTE))
    (tmp_path / "files" / "code" / "more.pt").write_bytes(bytes(MEBIBYTE))
    (tmp_path / "files" / "same.pt").symlink_to("model.pt")
    (tmp_path / "files" / "nowhere").symlink_to(tmp_path / "absent")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "files")
    return link


def loads(memory: MemoryCheck, model: Path, copies: int = 1) -> bool:
    async def scenario() -> None:
        async with memory.claim("m", model, copies):
            pass

    try:
        asyncio.run(scenario())
    except NotEnoughMemory:
        return False
    return True


def test_each_file_of_a_model_counts_once(model):
    assert bytes_in(model) == 3 * MEBIBYTE


@pytest.mark.parametrize(
    ("percent", "free", "copies", "is_loaded"),
    [
        (5, 8, 1, True),
        (5, 7, 1, False),
        (5, 11, 2, True),
        (5, 10, 2, False),
        (5, 0, 0, True),
        (0, 0, 1, True),
    ],
)
def test_a_model_must_fit_beside_what_is_kept_free(model, percent, free, copies, is_loaded):
    assert loads(check(percent, free), model, copies) == is_loaded


def test_what_is_about_to_be_loaded_is_not_left_for_others(model):
    memory = check(5, 10)

    async def scenario():
        async with memory.claim("first", model, 1):
            with pytest.raises(NotEnoughMemory) as refusal:
                async with memory.claim("second", model, 1):
                    pass
        assert refusal.value.status == 507
        assert refusal.value.message == (
            "Not enough memory to load model second: its files are 3 MiB for 1 worker(s), and "
            "2 MiB are left beside 5 MiB that are kept free (min_free_memory_percent=5)."
        )

    asyncio.run(scenario())
    assert loads(memory, model)  # a claim ends with its block


def test_a_load_that_fails_gives_its_claim_back(model):
    memory = check(5, 8)

    async def scenario():
        async with memory.claim("m", model, 1):
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(scenario())
    assert loads(memory, model)
