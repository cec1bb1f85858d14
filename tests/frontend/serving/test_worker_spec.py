import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import fakes
import pytest

from marserve.backend.manifest import Manifest
from marserve.frontend.archives.requirements import ModelEnvironment
from marserve.frontend.configuration.model_schema import TorchRun
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.worker_spec import ServedModel, worker_spec
from marserve.frontend.settings.model_settings import resolve_settings
from marserve.frontend.settings.parallel import Parallel
from marserve.frontend.workers.devices import DeviceAllocator


@pytest.fixture
def make_host(config):
    def make(**changes):
        cpu_launcher = changes.pop("cpu_launcher", False)
        return WorkerHost(
            replace(config, **changes),
            fakes.FakeLauncher(),
            DeviceAllocator(0),
            cpu_launcher=cpu_launcher,
        )

    return make


@pytest.fixture
def make_spec(make_host, config, tmp_path):
    """What the second of three workers is started with."""

    def make(environment=None, parallel=None, gpus=(), **host):
        settings = resolve_settings({}, {}, {}, config, gpus=0, default_workers=1)
        model = ServedModel(
            Manifest(model_name="m", model_version="1.0", handler="sub/h.py:f"),
            directory=tmp_path,
            settings=replace(settings, parallel=parallel),
            environment=environment or ModelEnvironment(),
        )
        return worker_spec(model, make_host(**host), 9001, gpus, position=1, count=3)

    return make


def test_the_environment_is_the_servers_less_what_is_withheld(make_host, monkeypatch):
    monkeypatch.setenv("AWS_SECRET", "s")
    monkeypatch.setenv("MY_AWS_SECRET", "t")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    host = make_host(
        blacklist_env_vars=re.compile("AWS_.*|ADDED"), decode_input_request=False, ipex_enable=True
    )
    environment = host.environment(["/model"], {"ADDED": "1", "OTHER": "2"})
    assert "AWS_SECRET" not in environment
    assert "ADDED" not in environment
    assert environment["OTHER"] == "2"
    assert environment["MY_AWS_SECRET"] == "t"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["TS_DECODE_INPUT_REQUEST"] == "false"
    assert environment["TS_IPEX_ENABLE"] == "true"
    assert environment["TS_IPEX_GPU_ENABLE"] == "false"
    assert environment["PYTHONPATH"] == "/mine:/model"


def test_worker_ids_count_up_and_parallel_workers_leave_room(make_host):
    host = make_host(initial_worker_port=1, initial_distribution_port=50)
    ids = [host.next_worker_id(level) for level in (0, 4, 0, 2, 1)]
    assert ids == [1, 50, 2, 54, 56]


# -- a worker's process ----------------------------------------------------------------------------


def test_a_plain_worker_is_a_child_of_the_servers_interpreter(make_spec, tmp_path):
    spec = make_spec()
    assert (spec.name, spec.python, spec.runner) == ("W-9001-m_1.0", "", None)
    assert spec.python_path == (str(tmp_path / "sub"), str(tmp_path))


def test_packages_of_its_own_want_an_interpreter_that_has_imported_nothing_yet(make_spec, tmp_path):
    spec = make_spec(ModelEnvironment(packages=("/packages",)))
    assert spec.python == sys.executable
    assert spec.python_path == (str(tmp_path / "sub"), str(tmp_path), "/packages")
    assert spec.environment["PYTHONPATH"].endswith(":/packages")


@pytest.mark.parametrize(
    ("environment", "python"), [("", "/bin/sh"), ("/venv/bin/python", "/venv/bin/python")]
)
def test_another_interpreter_is_the_models_or_the_operators(environment, python, make_spec):
    assert make_spec(ModelEnvironment(environment), python=Path("/bin/sh")).python == python


def test_the_servers_own_interpreter_is_no_other(make_spec):
    assert make_spec(python=Path(sys.executable)).python == ""


def test_the_same_program_in_another_place_is_another_environment(make_spec, tmp_path):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert make_spec(python=link).python == str(link)


def test_the_cpu_launcher_gives_each_worker_its_share(make_spec):
    spec = make_spec(cpu_launcher=True, cpu_launcher_args="--node-id 0  --x")
    assert spec.python == sys.executable
    assert spec.threads == 0
    assert spec.runner is not None
    assert spec.runner.module == "torch.backends.xeon.run_cpu"
    expected = ("--node-id", "0", "--x", "--ninstances", "3", "--rank", "1")
    assert (spec.runner.arguments, spec.runner.processes) == (expected, 1)


@pytest.mark.parametrize(("kind", "to_all"), [("tp", True), ("pptp", True), ("pp", False)])
def test_torchrun_starts_the_ranks(kind, to_all, make_spec, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOG_LOCATION", str(tmp_path))
    run = TorchRun(processes=2, omp_threads=5, monitor_interval=7)
    spec = make_spec(parallel=Parallel(kind, 2, run), gpus=(2, 3), cpu_launcher=True)
    assert spec.runner is not None
    assert (spec.runner.processes, spec.runner.to_all) == (2, to_all)
    assert spec.runner.meets_itself
    assert spec.runner.module == "torch.distributed.run"
    assert spec.runner.arguments == (
        "--nnodes=1",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        "--monitor-interval=7",
        f"--log-dir={tmp_path}/torchelastic_ts",
        "--rdzv-id=m_9001",
        "--max-restarts=0",
    )
    assert spec.environment["OMP_NUM_THREADS"] == "5"
    assert spec.environment["LOGLEVEL"] == "INFO"
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("run", "meets_itself", "conf"),
    [
        (TorchRun(rdzv_conf="timeout=9"), True, "timeout=9,store_type=file"),
        (TorchRun(rdzv_endpoint="h:1"), False, None),
        (TorchRun(rdzv_endpoint="h:1", rdzv_conf="timeout=9"), False, "timeout=9"),
        (TorchRun(nnodes=2), False, None),
        (TorchRun(rdzv_backend="static"), False, None),
    ],
)
def test_only_ranks_of_one_machine_meet_in_its_memory(run, meets_itself, conf, tmp_path):
    runner = Parallel("tp", 2, run).runner("w", tmp_path)
    assert runner is not None
    assert runner.meets_itself is meets_itself
    confs = [text for text in runner.arguments if text.startswith("--rdzv-conf=")]
    assert confs == ([f"--rdzv-conf={conf}"] if conf else [])


def test_a_worker_of_the_custom_type_is_one_process_that_sees_its_devices(make_spec, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    spec = make_spec(parallel=Parallel("custom", 2, TorchRun()), gpus=(2, 3))
    assert (spec.runner, spec.python) == (None, "")
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
