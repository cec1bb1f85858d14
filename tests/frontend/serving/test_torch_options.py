import pytest

from marserve.backend.processes.bootstrap import Runner
from marserve.frontend.serving.torch_options import torch_options, wait_environment
from marserve.frontend.settings.model_settings import resolve_settings
from marserve.frontend.workers.launchers.command import CPU_LAUNCHER

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


@pytest.fixture
def chosen(config):
    def choose(environment=None, *, cores=8, workers=1, runner="", **settings):
        return torch_options(
            resolve_settings({}, settings, {}, config, gpus=0, default_workers=1),
            environment or {},
            cores=cores,
            workers=workers,
            runner=Runner(runner, ()) if runner else None,
        )

    return choose


@pytest.mark.parametrize(("workers", "threads"), [(0, 8), (1, 8), (3, 2), (8, 1), (100, 1)])
def test_the_workers_of_a_model_share_the_cores(chosen, workers, threads):
    options, environment = chosen(workers=workers)
    assert (options.threads, options.is_share) == (threads, True)
    assert environment == PASSIVE


def test_what_the_environment_says_stands(chosen):
    said = {"OMP_NUM_THREADS": "5", "KMP_BLOCKTIME": "1"}
    options, environment = chosen(said)
    assert (options.threads, options.wait_policy, environment) == (0, "", said)
    assert options.threads_why == "OMP_NUM_THREADS=5 in the server's environment"


def test_a_models_setting_is_stronger_and_nothing_of_the_other_is_left(chosen):
    said = {"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "infinite", "OMP_WAIT_POLICY": "ACTIVE"}
    options, environment = chosen(said, torchThreads=3, torchWaitPolicy="passive")
    assert (options.threads, options.is_share, options.wait_policy) == (3, False, "passive")
    assert environment == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", **PASSIVE}
    _, environment = chosen(said, torchWaitPolicy="active")
    assert environment == {"OMP_NUM_THREADS": "5"}


def test_what_starts_processes_by_itself_shares_out_the_cores(chosen):
    options, environment = chosen(runner=CPU_LAUNCHER)
    assert (options.threads, options.wait_policy, environment) == (0, "", {})
    options, environment = chosen({"OMP_NUM_THREADS": "2"}, runner="torch.distributed.run")
    assert (options.threads, options.wait_policy) == (0, "passive")
    assert options.threads_why == "OMP_NUMBER_THREADS of torchrun: 2"
    options, _ = chosen(runner=CPU_LAUNCHER, torchThreads=2)
    assert options.threads == 2


def test_the_process_that_workers_are_forked_from_waits_as_most_of_them():
    assert wait_environment("auto", {"A": "b"}) == {"A": "b", **PASSIVE}
    assert wait_environment("auto", {"GOMP_SPINCOUNT": "9"}) == {"GOMP_SPINCOUNT": "9"}
    assert wait_environment("active", PASSIVE) == {}
