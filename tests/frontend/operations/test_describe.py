import pytest

from marserve.frontend.operations.describe import gpu_usage
from marserve.frontend.telemetry.gpu import Gpu

GPUS = [Gpu(None, None, None, None), Gpu(17, 3, 1024, 4096)]


@pytest.mark.parametrize(
    ("gpu_id", "text"),
    [
        (1, "gpuId::1 utilization.gpu::17 % utilization.memory::3 % memory.used::1024 MiB"),
        (0, "gpuId::0 utilization.gpu::[N/A] utilization.memory::[N/A] memory.used::[N/A]"),
        (2, "failed to obtained gpu usage"),
        (None, "N/A"),
    ],
)
def test_the_usage_of_a_gpu_is_in_torchserves_words(gpu_id, text):
    assert gpu_usage(gpu_id, GPUS) == text
