"""How much memory a server may use."""

from pathlib import Path

import psutil
import pytest

from marserve.frontend.configuration.memory import usable_memory

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
def test_a_container_may_allow_less_than_the_machine_has(
    tmp_path: Path, groups: str, limits: dict[str, str], usable: int
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(groups)
    for name, text in limits.items():
        file = tmp_path / "cgroups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert usable_memory(tmp_path, tmp_path / "cgroups") == usable
