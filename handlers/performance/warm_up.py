"""What a faster model is put through before its worker is ready, with samples of its input.

* Each size of batch is run once, so that nothing is compiled or recorded while clients wait.
* It is compared with itself in fp32.

Here, because an input needs the whole handler: the model alone does not know what a request is.
"""

import logging
import time

from marserve.backend.context import RunSamples
from marserve.backend.errors import OptionRefused
from marserve.backend.profiling.warm_up import WarmUpFailed
from marserve.handlers.performance.accuracy import Comparison
from marserve.handlers.performance.cuda_graphs import CudaGraphs
from marserve.handlers.performance.fixed_sizes import BatchSizes, FixedSizes
from marserve.handlers.performance.optimization import SECTION, AccuracyGoal
from marserve.handlers.performance.optimized_model import OptimizedModel
from marserve.handlers.performance.torch_compile import CompiledForward

logger = logging.getLogger(__name__)


class ModelWarmUp:
    """The warm-up of one model, for `marserve.backend.context.Context.warm_ups`."""

    def __init__(self, optimized: OptimizedModel, sizes: BatchSizes) -> None:
        self._optimized = optimized
        self._sizes = sizes

    def __call__(self, run: RunSamples) -> None:
        """Put the model through what there is.

        Raises:
            OptionRefused: Graphs cannot be recorded, or the model is not as accurate as wanted.
        """
        optimized = self._optimized
        if optimized.compiled is not None:
            self._compile(run, optimized.compiled, optimized.fixed)
        if optimized.graphs is not None:
            self._record(run, optimized.graphs, optimized.fixed)
        if optimized.options.accuracy is not None:
            self._compare(run, optimized.options.accuracy)

    def _compile(
        self, run: RunSamples, compiled: CompiledForward, fixed: FixedSizes | None
    ) -> None:
        """Have all sizes compiled; a slower model is better than none."""
        sizes = self._sizes.to_compile()
        try:
            _run_each(run, sizes)
        except WarmUpFailed as error:
            _report_failure(run, compiled, error)
            return
        if fixed is not None:
            fixed.end_warm_up(sizes)
            compiled.end_warm_up()

    def _record(self, run: RunSamples, graphs: CudaGraphs, fixed: FixedSizes | None) -> None:
        sizes = self._sizes.to_record()
        try:
            _run_each(run, sizes)
        except WarmUpFailed as error:
            raise OptionRefused(f"{SECTION}.cuda_graphs: nothing is recorded: {error}") from error
        graphs.end_warm_up()
        if fixed is not None:
            fixed.end_warm_up(sizes)

    def _compare(self, run: RunSamples, goal: AccuracyGoal) -> None:
        """Run the samples through both models."""
        optimized, forward = self._optimized, self._optimized.model.forward
        assert optimized.reference is not None
        comparison = Comparison(optimized.reference, forward)
        optimized.model.forward = comparison
        try:
            for file in goal.samples or ("",):
                run(1, file)
        except WarmUpFailed as error:
            raise OptionRefused(f"{SECTION}.check_accuracy: {error}") from error
        finally:
            optimized.model.forward, optimized.reference = forward, None
        optimized.accuracy = comparison.accuracy
        logger.info("Against fp32: %s", optimized.accuracy)
        optimized.accuracy.check(goal)


def _run_each(run: RunSamples, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        started = time.perf_counter()
        run(size)
        logger.info("Batch size %d: first run %.1f s", size, time.perf_counter() - started)


def _report_failure(run: RunSamples, compiled: CompiledForward, error: WarmUpFailed) -> None:
    """Find out who is at fault: the compiler, or the sample, which may not be meant for the model.

    Without the compiler the model is served as it is. Without a sample it is compiled later.
    """
    try:
        with compiled.switched_off():
            run()
    except WarmUpFailed:
        logger.warning("Nothing can be compiled before the first requests come: %s", error)
    else:
        compiled.give_up()
        logger.warning("Compiling failed; the model is served uncompiled.")
