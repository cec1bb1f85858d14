"""The number of threads of a worker's torch, how they wait for each other, and the reasons.

By precedence: the settings; the variables of OpenMP in the server's environment, and programs that
divide the cores themselves (torchrun and torch's launcher for CPUs); the worker's share of the
cores, and passive waiting.
"""

from collections.abc import Mapping

from marserve.backend.processes.bootstrap import Runner
from marserve.frontend.configuration.setting_kinds import AUTOMATIC
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.workers.launchers.command import CPU_LAUNCHER
from marserve.frontend.workers.launchers.openmp import (
    PASSIVE,
    TorchOptions,
    variables_of,
    with_wait_policy,
)

_COUNT = "OMP_NUM_THREADS"
_COUNTS = (_COUNT, "MKL_NUM_THREADS")
_ORIGINS = {
    "request": "its registration",
    "yaml": "model-config.yaml",
    "models": "models= of config.properties",
    "server": "config.properties",
}


def torch_options(
    settings: ModelSettings,
    environment: Mapping[str, str],
    *,
    cores: int,
    workers: int,
    runner: Runner | None = None,
) -> tuple[TorchOptions, Mapping[str, str]]:
    """Return the options of one of ``workers`` workers, and its environment with these options.

    ``environment`` is the one without them; ``runner`` starts the processes, if not the server.
    """
    policy, wait_why = _wait_policy(settings, environment, runner)
    threads, threads_why, is_share = _threads(settings, environment, cores, workers, runner)
    agreed = with_wait_policy(environment, policy) if policy else dict(environment)
    if settings.torch_threads:
        agreed |= dict.fromkeys(_COUNTS, str(threads))
    return TorchOptions(threads, threads_why, is_share, policy, wait_why), agreed


def wait_environment(wait_policy: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of workers without a setting of their model."""
    if wait_policy == AUTOMATIC:
        if variables_of(environment):
            return environment
        wait_policy = PASSIVE
    return with_wait_policy(environment, wait_policy)


def threads_to_try(options: TorchOptions, settings: ModelSettings, gpu: int | None) -> list[int]:
    """Return the numbers of torch's threads that a worker compares at load; empty for no choice.

    It is empty on a GPU, where these threads have little work, and for modes without batches.
    """
    has_batches = not (settings.mode or settings.debugged or settings.stateful)
    if not options.is_share or options.threads < 2 or gpu is not None or not has_batches:
        return []
    powers = (1 << exponent for exponent in range(options.threads.bit_length()))
    return sorted({*(power for power in powers if power < options.threads), options.threads})


def _wait_policy(
    settings: ModelSettings, environment: Mapping[str, str], runner: Runner | None
) -> tuple[str, str]:
    if settings.torch_wait_policy != AUTOMATIC:
        return settings.torch_wait_policy, _chosen("torchWaitPolicy", "torch_wait_policy", settings)
    if variables_of(environment):
        texts = (f"{name}={value}" for name, value in variables_of(environment).items())
        return "", f"{', '.join(texts)} in the server's environment"
    if runner is not None and runner.module == CPU_LAUNCHER:
        return "", "left to torch's launcher for CPUs"
    return PASSIVE, "auto: a thread that waits leaves its core to others"


def _threads(
    settings: ModelSettings,
    environment: Mapping[str, str],
    cores: int,
    workers: int,
    runner: Runner | None,
) -> tuple[int, str, bool]:
    if settings.torch_threads:
        return settings.torch_threads, _chosen("torchThreads", "torch_threads", settings), False
    if runner is not None:
        if runner.module == CPU_LAUNCHER:
            return 0, "left to torch's launcher for CPUs", False
        return 0, f"OMP_NUMBER_THREADS of torchrun: {environment.get(_COUNT)}", False
    if _COUNT in environment:
        return 0, f"{_COUNT}={environment[_COUNT]} in the server's environment", False
    share = max(1, cores // max(1, workers))
    return share, f"auto: its share of {cores} cores for {workers} workers", True


def _chosen(key: str, field: str, settings: ModelSettings) -> str:
    origin = settings.origins.get(field, "")
    return f"{key} of {_ORIGINS.get(origin, f'a {origin}' if origin else 'the model')}"
