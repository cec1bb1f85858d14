from pathlib import Path

import pytest

from marserve.frontend.workers.cores import usable_cores

V2 = "sys/fs/cgroup/cpu.max"


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        pytest.param("0::/\n", {V2: "max 100000\n"}, 8, id="no quota"),
        pytest.param("0::/\n", {V2: "200000 100000\n"}, 2, id="v2"),
        pytest.param("0::/\n", {V2: "250000 100000\n"}, 2, id="rounded down"),
        pytest.param("0::/\n", {V2: "50000 100000\n"}, 1, id="less than one"),
        pytest.param("0::/\n", {V2: "1600000 100000\n"}, 8, id="more than all of them"),
        pytest.param(
            "0::/pod/box\n",
            {
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
            },
            3,
            id="that of a group around ours",
        ),
        pytest.param(
            "0::/pod/box\n",
            {V2: "400000 100000\n"},
            4,
            id="mounted at the top",
        ),
        pytest.param(
            "0::/../other\n",
            {V2: "400000 100000\n"},
            4,
            id="another namespace",
        ),
        pytest.param(
            "4:memory:/m\n1:cpu,cpuacct:/box\n0::/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
            },
            3,
            id="v1",
        ),
        pytest.param(
            "1:cpu:/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
            id="v1 without a quota",
        ),
        pytest.param("0::/\n", {V2: "many\n"}, 8, id="unreadable"),
        pytest.param("0::/\n", {V2: "1 0\n"}, 8, id="no period"),
        pytest.param("odd\n", {}, 8, id="no groups"),
    ],
)
def test_a_quota_of_cpu_time_counts_where_it_is_less_than_the_cores(tmp_path, groups, files, cores):
    root = tree(tmp_path, groups, files)
    assert usable_cores(root / "proc", root / "sys/fs/cgroup", affinity=8) == cores


def test_without_control_groups_it_is_the_cores_that_may_be_run_on(tmp_path):
    assert usable_cores(tmp_path, tmp_path, affinity=5) == 5
    assert usable_cores() >= 1
