"""Exceptions for handlers and their authors, and what an exception means for batch and process.

An exception of a handler fails its batch only. But after some errors of a GPU, according to CUDA's
documentation, any further work of the process returns the same error. Such an error *poisons* the
process: the batch is answered, and the frontend replaces the worker.

Exceptions are classified by their text, because torch raises RuntimeError for most of them, and a
worker does not import torch. Exceptions about values (ValueError, KeyError) are ignored: they quote
what clients send.
"""

import re
from collections.abc import Iterator
from typing import Any

#: The logger for failures in handlers' code.
HANDLER_LOG = "marserve.backend.handler"

# Texts of exceptions for lack of memory. TorchServe checks for "CUDA" only, which is in the text of
# every failure on an NVIDIA GPU; the others are torch's on AMD's GPUs and on the CPU.
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")
_NO_MEMORY = ("CUDA", *_OUT_OF_MEMORY)
# Texts about CUDA that more free memory does not help: the GPU does not exist, or torch was built
# for others.
_UNFIT_GPU = re.compile(
    r"Attempting to deserialize object on|No CUDA GPUs|NVIDIA driver|CUDA driver"
    r"|no kernel image|invalid device ordinal"
)

# Errors after which a CUDA context is unusable: texts of cudaGetErrorString, and names of the
# runtime, the driver and HIP.
_STICKY = re.compile(
    r"device-side assert"
    r"|illegal memory access"
    r"|illegal instruction was encountered"
    r"|misaligned address"
    r"|unspecified launch failure"
    r"|the launch timed out and was terminated"
    r"|hardware stack error"
    r"|invalid program counter"
    r"|operation not supported on global/shared address space"
    r"|uncorrectable (ECC|NVLink) error"
    r"|context is destroyed"
    r"|(cuda|hip)Error(Assert|IllegalAddress|IllegalInstruction|MisalignedAddress|LaunchFailure"
    r"|LaunchTimeout|LaunchTimeOut|HardwareStackError|InvalidPc|InvalidAddressSpace"
    r"|ECC(Uncorrectable|NotCorrectable)|NvlinkUncorrectable|ContextIsDestroyed)"
    r"|CUDA_ERROR_(ASSERT|ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|LAUNCH_FAILED"
    r"|LAUNCH_TIMEOUT|HARDWARE_STACK_ERROR|INVALID_PC|INVALID_ADDRESS_SPACE|ECC_UNCORRECTABLE"
    r"|NVLINK_UNCORRECTABLE|CONTEXT_IS_DESTROYED)"
)
# Of torch's class for errors of an accelerator's runtime, since 2.8, those that concern one call.
_OF_ONE_CALL = re.compile(
    r"out of memory|invalid (argument|configuration argument|device ordinal|resource handle)"
    r"|no kernel image|operation not (supported|permitted)|too many resources requested"
)
_ABOUT_VALUES = (LookupError, TypeError, ValueError)
#: The message of a failed batch; TorchServe's.
FAILED = "Prediction failed"
_POISONED = "Prediction failed: the worker's GPU has failed, and the worker is replaced"


class PredictionException(Exception):
    """Raised by a handler to answer its batch with this message and HTTP status."""

    __module__ = "ts.utils.util"  # in tracebacks, the name that handlers import

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message, error_code)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class HandlerUnusable(ValueError):
    """The module contains no handler, or more than one."""


class OptionRefused(HandlerUnusable):
    """model-config.yaml contains an option that the handler does not have or cannot apply."""


# The names of the following are TorchServe's, because handlers catch them.


class MetricsCacheTypeError(TypeError):
    """A metric's name, value or type has a wrong type."""


class MetricsCacheValueError(ValueError):
    """A unit does not fit the method that reports the metric."""


class MetricsCacheKeyError(KeyError):
    """There is no metric of that name and type."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the sentence in quotes


def text_of(error: BaseException) -> str:
    """Return the text of an exception; empty if ``str`` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception class of the author's
        return ""


def sentence_of(error: BaseException) -> str:
    """Return the type of an exception, and its text if it has one."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def failure_of(error: BaseException) -> tuple[int, str]:
    """Return the status and the message for clients; as in TorchServe.

    A group of exceptions (of `asyncio.TaskGroup`) counts as the first of them.
    """
    if isinstance(error, BaseExceptionGroup):
        return failure_of(error.exceptions[0])
    if isinstance(error, PredictionException):
        return batch_status(error.error_code), str(error.message)
    if poison_of(error):
        return 503, _POISONED
    if isinstance(error, MemoryError) or any(word in text_of(error) for word in _NO_MEMORY):
        return 507, "Out of resources"
    return 503, FAILED


def failed_request(request_id: str) -> str:
    """Return the message for the client of a request whose traceback is in the model's log."""
    return f"{FAILED}. The traceback is in model_log.log, with the request id {request_id}."


def batch_status(code: Any) -> int:
    """Return the status of a failed batch: 507 for 413, 500 for success and invalid codes."""
    if not isinstance(code, int) or not 200 < code <= 999:
        return 500
    return 507 if code == 413 else int(code)


def load_status(error: Exception) -> int:
    """Return the status of a failed load: 507 for lack of memory, else 500.

    Causes count: SageMaker's handler raises its own exception for those of torch.
    """
    if poison_of(error):
        return 500
    text = text_of(error) if isinstance(error, RuntimeError) else ""
    is_of_gpu = "CUDA" in text and not _UNFIT_GPU.search(text)
    return 507 if is_of_gpu or any(map(_is_of_memory, _with_causes(error))) else 500


def poison_of(error: BaseException) -> str:
    """Return the error that has poisoned this process, or a cause of it; empty if none has."""
    for each in _with_causes(error):
        if not isinstance(each, _ABOUT_VALUES) and _is_sticky(each):
            return sentence_of(each).partition("\n")[0]
    return ""


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        return any(word in text_of(error) for word in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def _is_sticky(error: BaseException) -> bool:
    text = text_of(error)
    if _STICKY.search(text):
        return True
    is_of_accelerator = any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__)
    return is_of_accelerator and not _OF_ONE_CALL.search(text)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting.append(error.__cause__ or error.__context__)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
