"""How much memory a server may use."""

from pathlib import Path

import psutil
import pytest

from marserve.frontend.configuration.memory import free_memory, usable_memory

MACHINE = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("groups", "limits", "usable"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "1000\n", "a/memory.max": "max\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "500\n"}, 500),
        ("0::/\n", {"memory.max": "700\n"}, 700),
        ("0::/hidden/name\n", {"memory.max": "700\n"}, 700),
        (
            "3:cpu,memory:/a\n2:pids:/a\n",
            {"memory/a/memory.limit_in_bytes": "800\n", "a/memory.max": "1\n"},
            800,
        ),
        ("0::/a\n", {"a/memory.max": "9" * 18}, MACHINE),
        ("", {}, MACHINE),
    ],
)
def test_a_container_may_allow_less_than_the_machine_has(tmp_path, groups, limits, usable):
    _write(tmp_path, groups, limits)
    assert usable_memory(tmp_path, tmp_path / "cgroups") == usable


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        (
            "0::/a/b\n",
            {
                "a/memory.max": "1000\n",
                "a/memory.current": "700\n",
                "a/memory.stat": "anon 550\nactive_file 100\ninactive_file 50\nfile 999\n",
                "a/b/memory.max": "max\n",
            },
            450,
        ),
        (
            "3:cpu,memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "1000\n",
                "memory/a/memory.usage_in_bytes": "700\n",
                "memory/a/memory.stat": "active_file 1\ntotal_active_file 200\n",
            },
            500,
        ),
        ("0::/\n", {"memory.max": "100\n", "memory.current": "110\n"}, 0),
        ("0::/\n", {"memory.max": "100\n"}, 100),
    ],
)
def test_pages_of_files_are_left_to_use(tmp_path, groups, files, left):
    _write(tmp_path, groups, files)
    assert free_memory(tmp_path, tmp_path / "cgroups") == left


def test_without_a_limit_what_the_machine_has_available_is_left(tmp_path):
    _write(tmp_path, "0::/a\n", {"a/memory.max": "max\n"})
    assert 0 < free_memory(tmp_path, tmp_path / "cgroups") <= MACHINE


def _write(folder: Path, groups: str, files: dict[str, str]) -> None:
    (folder / "self").mkdir()
    (folder / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        file = folder / "cgroups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
