import traceback

import pytest

from marserve.backend.errors import PredictionException, failure_of, load_status, poison_of


class AcceleratorError(RuntimeError):
    """As torch calls its own since 2.8."""


STICKY = [
    RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("HIP error: unspecified launch failure"),
    RuntimeError("cudaErrorLaunchFailure: something"),
    Exception("[TRT] CUDA_ERROR_ILLEGAL_ADDRESS"),
    AcceleratorError("CUDA error: misaligned address"),
    AcceleratorError("CUDA error: of a kind that comes with the next driver"),
]
NOT_STICKY = [
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    AcceleratorError("CUDA error: out of memory"),
    AcceleratorError("CUDA error: invalid argument"),
    RuntimeError("CUDA error: invalid device ordinal"),
    ValueError("no label 'device-side assert triggered'"),
    MemoryError(),
]
# Of torch.load: freeing memory would not help.
SAVED_ON_A_GPU = (
    "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False."
)


@pytest.mark.parametrize("error", STICKY)
def test_an_error_that_sticks_to_the_process_is_no_want_of_memory(error):
    assert poison_of(error) == f"{type(error).__name__}: {error}".partition("\n")[0]
    assert failure_of(error)[0] == 503
    assert load_status(error) == 500


@pytest.mark.parametrize("error", NOT_STICKY)
def test_want_of_memory_and_what_clients_send_poison_nothing(error):
    assert not poison_of(error)


def test_an_error_that_sticks_is_found_behind_what_the_handler_makes_of_it():
    raised = PredictionException("try again", 418)
    raised.__context__ = STICKY[0]  # raised in an except clause
    assert poison_of(raised) == "RuntimeError: CUDA error: device-side assert triggered"
    assert failure_of(raised) == (418, "try again")


def _raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 507),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), 507),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), 507),
        (_raised_from(ImportError("Failed to load model.pt"), RuntimeError("out of memory")), 507),
        (_raised_from(ImportError("no model"), RuntimeError("No CUDA GPUs are available")), 500),
        (FileNotFoundError("out of memory.pt"), 500),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"), 507),  # mostly want of memory
        (RuntimeError(SAVED_ON_A_GPU), 500),
        (RuntimeError("No CUDA GPUs are available"), 500),
        (RuntimeError("CUDA error: no kernel image is available for execution"), 500),
    ],
)
def test_a_load_that_memory_ran_out_in_says_so(error, status):
    assert load_status(error) == status


def test_a_traceback_names_the_exception_as_handlers_import_it():
    (line,) = traceback.format_exception_only(PredictionException("no tea", 418))
    assert line == "ts.utils.util.PredictionException: no tea : 418\n"
