"""Workers of several processes, under real torchrun on the CPU, and under torch's CPU launcher."""

import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.integration

SECONDS = 60.0

RANKS = """
import os, signal, subprocess, time
import torch
import torch.distributed as dist

class Handler:
    def initialize(self, context):
        self.rank = int(os.environ["RANK"])
        self.config = context.model_yaml_config["handler"]
        if self.config.get("bad_rank") == self.rank:
            raise ValueError(f"no weights for rank {self.rank}")
        dist.init_process_group("gloo")
        self.count = 0
        threads = os.environ["OMP_NUM_THREADS"]
        print(f"rank {self.rank} of {dist.get_world_size()} threads {threads}")

    def handle(self, data, context):
        self.count += 1
        task = bytes(data[0]["body"]).decode()
        if task.startswith("die") and task.endswith(str(self.rank)):
            os.kill(os.getpid(), signal.SIGKILL)
        if task.startswith("exit") and task.endswith(str(self.rank)):
            os._exit(0)
        if task == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(600)
        if task == "child":
            return [[os.getpid(), subprocess.Popen(["sleep", "600"]).pid] for _ in data]
        if task == "count":
            return [[self.rank, self.count] for _ in data]
        total = torch.tensor([float(task.split()[-1]) * (self.rank + 1)])
        dist.all_reduce(total)
        return [total.item() for _ in data]
"""


def config(kind: str = "tp", **handler: Any) -> str:
    lines = [f"  {key}: {value}" for key, value in {"made_for": "tests", **handler}.items()]
    return "\n".join(
        [
            f"parallelType: {kind}",
            "torchrun: {nproc-per-node: 2, OMP_NUMBER_THREADS: 3}",
            "minWorkers: 1",
            "maxWorkers: 1",
            "responseTimeout: 5",
            "startupTimeout: 60",
            "handler:",
            *lines,
        ]
    )


@pytest.fixture(scope="module")
def server(prepare_server, tmp_path_factory):
    # torch may leave its compiler's cache behind, in the ranks that are killed.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    # With GPUs, a rank would need one for itself.
    properties = {"initial_distribution_port": "30000", "number_of_gpu": "0"}
    with prepare_server(environment, **properties) as shared:
        shared.start()
        yield shared
        shared.stop()


def register(
    server: Any, make_archive: Callable[..., Any], handler: str, name: str, text: str
) -> Any:
    archive = make_archive(server.store, handler, name, text)
    return server.management("POST", "/models", params={"url": archive.name}, timeout=SECONDS)


@pytest.fixture(scope="module")
def tensor_parallel(server, make_archive):
    """A server with a model of two ranks, named ``tp``."""
    answer = register(server, make_archive, RANKS, "tp", config())
    assert answer.status_code == 200, answer.text
    return server


def members(server: Any, model: str) -> list[psutil.Process]:
    """The processes of a model's worker, without the one that started them."""
    return psutil.Process(server.worker(model)["pid"]).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def is_new(worker: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a worker has been started again, and is ready."""
    return bool(worker["status"] == "READY" and worker["pid"] != old["pid"])


def test_all_ranks_work_on_each_batch_and_one_answers(tensor_parallel):
    for number in (1.0, 2.5):
        answer = tensor_parallel.predict("tp", data=str(number))
        assert (answer.status_code, answer.json()) == (200, number * 3)
    described = tensor_parallel.describe("tp")
    assert (described["parallelType"], described["parallelLevel"]) == ("tp", 2)
    assert int(described["workers"][0]["id"]) >= 30000
    tensor_parallel.wait_logged("model_log.log", "rank 1 of 2 threads 3")
    logs = tensor_parallel.directory / "logs" / "torchelastic_ts"
    assert any(path.name.startswith("tp_30") for path in logs.iterdir())


@pytest.mark.parametrize(
    ("death", "how"),
    [("die 0", "was killed by SIGKILL"), ("die 1", "was killed by SIGKILL"), ("exit 1", "ended ")],
)
def test_a_rank_that_ends_takes_the_others_with_it_and_the_worker_comes_back(
    death, how, tensor_parallel, wait_for
):
    old = tensor_parallel.worker("tp")
    _, child = tensor_parallel.predict("tp", data="child").json()
    before = members(tensor_parallel, "tp")
    assert len(before) == 4  # each rank has left a child
    assert child in [item.pid for item in before]
    # 503 when the first rank could still say that it lost the other one, as gloo may notice.
    answer = tensor_parallel.predict("tp", data=death, timeout=SECONDS)
    assert answer.status_code in (500, 503)
    wait_for(lambda: not any(is_alive(item) for item in before))
    wait_for(lambda: is_new(tensor_parallel.worker("tp"), old), SECONDS)
    # torchrun may have looked first; then its own exit status is all there is to tell.
    reason = tensor_parallel.worker("tp")["lastError"]
    assert how in reason or "ended with exit status 1" in reason
    assert tensor_parallel.predict("tp", data="1").json() == 3


def test_ranks_that_hang_are_killed_with_their_children(tensor_parallel, wait_for):
    old = tensor_parallel.worker("tp")
    own, child = tensor_parallel.predict("tp", data="child").json()
    before = [*members(tensor_parallel, "tp"), psutil.Process(child)]
    assert {own, child} <= {item.pid for item in before}
    assert tensor_parallel.predict("tp", data="hang", timeout=SECONDS).status_code == 500
    wait_for(lambda: not any(is_alive(item) for item in before))
    wait_for(lambda: is_new(tensor_parallel.worker("tp"), old), SECONDS)


def test_in_a_pipeline_only_the_first_rank_gets_the_batches(server, make_archive):
    answer = register(server, make_archive, RANKS, "pp", config("pp"))
    assert answer.status_code == 200, answer.text
    assert [server.predict("pp", data="count").json() for _ in range(2)] == [[0, 1], [0, 2]]
    assert len(members(server, "pp")) == 2
    assert server.management("DELETE", "/models/pp").status_code == 200


def test_the_reason_of_a_rank_that_does_not_load_is_told(server, make_archive):
    answer = register(server, make_archive, RANKS, "bad", config(bad_rank=1))
    assert answer.status_code == 500
    assert "no weights for rank 1" in answer.json()["message"]
    assert not server.is_known("bad")


CUSTOM = """
import os

def handle(data, context):
    if data is not None:
        return [[os.getppid(), os.environ.get("RANK")] for _ in data]
"""


@pytest.mark.parametrize(
    ("keys", "level"),
    [
        ("parallelType: custom\nparallelLevel: 4", 4),
        ("optimization: {device_stages: ['cuda:0', 'cuda:1']}", 2),
        ("optimization: {device_stages: ['cuda:2', cpu]}", 3),
        (
            "parallelType: custom\nparallelLevel: 4\n"
            "optimization: {device_stages: ['cuda:0', 'cuda:1']}",
            4,
        ),
    ],
)
def test_the_custom_type_is_one_process(server, make_archive, keys, level):
    yaml = f"{keys}\nminWorkers: 1\nmaxWorkers: 1\n"
    answer = register(server, make_archive, CUSTOM, "custom", yaml)
    assert answer.status_code == 200, answer.text
    assert server.predict("custom", data="x").json()[1] is None
    described = server.describe("custom")
    assert (described["parallelType"], described["parallelLevel"]) == ("custom", level)
    assert server.management("DELETE", "/models/custom").status_code == 200


@pytest.mark.parametrize("stages", ["[cpu, cpu]", "2", "[cuda:x]"])
def test_stages_that_name_no_gpus_make_no_group(server, make_archive, stages):
    yaml = f"optimization: {{device_stages: {stages}}}\nminWorkers: 1\nmaxWorkers: 1\n"
    assert register(server, make_archive, CUSTOM, "no-group", yaml).status_code == 200
    assert server.describe("no-group")["parallelLevel"] == 0
    assert server.management("DELETE", "/models/no-group").status_code == 200


# -- torch's launcher for CPUs ---------------------------------------------------------------------

CORES = """
import os, time

def handle(data, context):
    if data is not None:
        time.sleep(0.2)
        cores = sorted(os.sched_getaffinity(0))
        return [[os.getpid(), cores] for _ in data]
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers want two cores")
def test_the_cpu_launcher_binds_each_worker_to_its_cores_and_scaling_binds_anew(
    prepare_server, together
):
    with prepare_server(
        cpu_launcher_enable="true", cpu_launcher_args="--use-logical-core"
    ) as server:
        server.start()
        server.install(CORES, "cores")
        first = server.predict("cores", data="x").json()[0]
        answer = server.management(
            "PUT", "/models/cores", params={"min_worker": 2, "synchronous": "true"}, timeout=SECONDS
        )
        assert answer.status_code == 200, answer.text
        answers = together([lambda: server.predict("cores", data="x").json()] * 8)
        by_worker = dict(answers)
        assert first not in by_worker
        assert len(by_worker) == 2
        one, two = by_worker.values()
        assert not set(one) & set(two)
        server.stop()


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [({"PATH": "/nonexistent"}, ""), ({}, "--ninstances 1 --ncore_per_instance 16 --node_id 0")],
)
def test_where_the_cpu_launcher_does_not_work_workers_start_without_it(
    prepare_server, environment, arguments
):
    with prepare_server(
        environment, cpu_launcher_enable="true", cpu_launcher_args=arguments
    ) as server:
        server.start()
        server.install(CORES, "plain")
        assert server.predict("plain", data="x").status_code == 200
        server.wait_logged("ts_log.log", "Workers start without the CPU launcher")
        server.stop()
