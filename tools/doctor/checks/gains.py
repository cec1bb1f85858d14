"""Possible improvements over TorchServe, with the command that measures them."""

from collections.abc import Iterator, Mapping
from typing import Any

from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding

_SEVERAL = 2
_EAGER = (".pth", ".safetensors", ".bin")


def tune_command(model: str) -> str:
    """Return the command that finds the settings of a model by measurements."""
    return f"marserve bench {model} --input SAMPLE --tune 100 --batch-size 32"


def unbatched(place: Place, model: str, batch_size: int, workers: int) -> Iterator[Finding]:
    """Report a model with several workers that process one request each."""
    if batch_size == 1 and workers >= _SEVERAL:
        yield finding(
            "batching",
            place,
            f"{model} has {workers} workers and batches of 1.",
            f"Fewer workers with batches often have a higher throughput: {tune_command(model)}",
        )


def of_model_yaml(
    place: Place, model: str, parsed: Mapping[str, Any], *, is_base_handler: bool
) -> Iterator[Finding]:
    """Report useful settings that a model-config.yaml lacks and the handler reads."""
    is_on_gpu = str(parsed.get("deviceType", "")).lower() == "gpu"
    if is_base_handler and is_on_gpu and "optimization" not in parsed and "pt2" not in parsed:
        yield finding(
            "precision",
            place,
            f"{model} computes in fp32 on a GPU.",
            "Try optimization: {precision: bf16} in model-config.yaml, with check_accuracy.",
        )
    pt2 = parsed.get("pt2")
    compiles = isinstance(pt2, dict) and isinstance(pt2.get("compile"), dict)
    enabled = compiles and pt2["compile"].get("enable", True)  # type: ignore[index]
    if is_base_handler and enabled and "compiledBatchSizes" not in parsed:
        yield finding(
            "compile",
            place,
            f"{model} is compiled; a batch of a new size may be compiled while its clients wait.",
            "Set compiledBatchSizes: [1, 4, 8]. These sizes are compiled before it is READY.",
        )
