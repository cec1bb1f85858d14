"""What a handler may raise, what may be raised at its author, and what either means.

A handler's exception is its batch's, and the next batch may be well. Not so after some errors of a
GPU: CUDA's documentation says of them that the process is left in an inconsistent state, in which
any further work returns the same error, and that it has to be ended and started anew. Such an error
*poisons* the process: the batch is answered, and the frontend replaces the worker.

Exceptions are known by what they say, because torch raises a plain RuntimeError for most of them,
and a worker must not import torch to look. Exceptions that speak of values (ValueError, KeyError)
are left out: they quote what clients send.
"""

import re
from collections.abc import Iterator
from typing import Any

#: The logger of what goes wrong in handlers' code.
HANDLER_LOG = "marserve.backend.handler"

# How exceptions speak that are about memory. TorchServe knew the first only, which speaks of every
# mishap on an NVIDIA GPU; the others are torch's on AMD's GPUs and on the CPU.
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")
_NO_MEMORY = ("CUDA", *_OUT_OF_MEMORY)
# What speaks of CUDA, and is about a GPU that is not there or a build that is for others: free
# memory helps none of it.
_UNFIT_GPU = re.compile(
    r"Attempting to deserialize object on|No CUDA GPUs|NVIDIA driver|CUDA driver"
    r"|no kernel image|invalid device ordinal"
)

# The errors after which a CUDA context is of no use: in the words of cudaGetErrorString, and by the
# names that the runtime, the driver and HIP have for them.
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
# torch's class for errors of an accelerator's runtime, since 2.8; and what it is also raised for
# that concerns one call only.
_ACCELERATOR_ERROR = "AcceleratorError"
_OF_ONE_CALL = re.compile(
    r"out of memory|invalid (argument|configuration argument|device ordinal|resource handle)"
    r"|no kernel image|operation not (supported|permitted)|too many resources requested"
)
_ABOUT_VALUES = (LookupError, TypeError, UnicodeError, ValueError)
_POISONED = "Prediction failed: the worker's GPU is of no use any more, and the worker is replaced"


class PredictionException(Exception):
    """Raised by a handler to answer every request of its batch with one status and one sentence.

    ``message`` is what the clients are told, ``error_code`` the HTTP status of the answers.
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message, error_code)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class HandlerUnusable(ValueError):
    """The module holds nothing that can be called as a handler, or more than one such thing."""


class OptionRefused(HandlerUnusable):
    """model-config.yaml asks a handler for what it does not know or cannot do; the text says."""


# A metric was reported in a way that cannot be counted. The names are TorchServe's, because
# handlers catch them.


class MetricsCacheTypeError(TypeError):
    """A metric's name, value or type is of the wrong kind."""


class MetricsCacheValueError(ValueError):
    """A unit that does not measure what the call reports."""


class MetricsCacheKeyError(KeyError):
    """No metric of that name and type."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the sentence in quotes


def text_of(error: BaseException) -> str:
    """What an exception says; empty if it cannot even do that."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception class of the author's
        return ""


def sentence_of(error: BaseException) -> str:
    """The type of an exception and what it says, if it says anything."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def failure_of(error: BaseException) -> tuple[int, str]:
    """Status and sentence that TorchServe's clients get for an exception of a handler.

    A group of exceptions, as `asyncio.TaskGroup` raises it, counts as the first of them.
    """
    if isinstance(error, BaseExceptionGroup):
        return failure_of(error.exceptions[0])
    if isinstance(error, PredictionException):
        return batch_status(error.error_code), str(error.message)
    if poison_of(error):
        return 503, _POISONED
    if isinstance(error, MemoryError) or any(word in text_of(error) for word in _NO_MEMORY):
        return 507, "Out of resources"
    return 503, "Prediction failed"


def batch_status(code: Any) -> int:
    """The status of a batch that failed: 413 becomes 507; what says success or nothing, 500."""
    if not isinstance(code, int) or not 200 < code <= 999:
        return 500
    return 507 if code == 413 else int(code)


def load_status(error: Exception) -> int:
    """The status of a load that failed: 507 where memory ran out, else 500.

    It may have run out in what the handler caught before it raised another exception: SageMaker's
    makes its own of whatever torch raises.
    """
    if poison_of(error):
        return 500
    text = text_of(error) if isinstance(error, RuntimeError) else ""
    is_of_gpu = "CUDA" in text and not _UNFIT_GPU.search(text)
    return 507 if is_of_gpu or any(map(_is_of_memory, _with_causes(error))) else 500


def poison_of(error: BaseException) -> str:
    """The error that has poisoned this process, a sentence; empty where none has.

    It may be one that the handler caught before it raised another.
    """
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
    is_of_accelerator = any(kind.__name__ == _ACCELERATOR_ERROR for kind in type(error).__mro__)
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
