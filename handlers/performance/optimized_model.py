"""Makes an eager model faster in place, as its model-config.yaml asks for.

The model stays the object that it was, whatever handlers do with it besides calling it (with
torch.compile it becomes what that makes of it, as in TorchServe). What changes is its ``forward``,
from the inside out:

    its own, with folded batch norms, in its precision and layout; compiled, or by stages
    → autocast → CUDA graphs → casts of what goes in and what comes out
    → batches filled up to the sizes that were warmed up

The warm-up, before the worker is ready, has samples of the handler's input: the model alone does
not know what a request is. Each size of batch is run once, so that nothing is compiled or recorded
while clients wait, and the model is compared with itself in fp32.
"""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from marserve.backend.context import Context, RunSamples
from marserve.backend.errors import OptionRefused
from marserve.backend.profiling.warm_up import WarmUpFailed
from marserve.handlers.performance.accuracy import Accuracy, Comparison
from marserve.handlers.performance.batch_norm import fold_batch_norms
from marserve.handlers.performance.compilation import (
    Compilation,
    compile_options,
    compiled_graphs,
)
from marserve.handlers.performance.cuda_graphs import CudaGraphs
from marserve.handlers.performance.device_stages import DeviceStages, partition_stages, stages_of
from marserve.handlers.performance.fixed_sizes import BatchSizes, FixedSizes
from marserve.handlers.performance.optimization import (
    SECTION,
    AccuracyGoal,
    Optimization,
    read_optimization,
)
from marserve.handlers.performance.precision import (
    Forward,
    autocast,
    cast_inputs,
    lower_weights,
    raise_outputs,
)
from marserve.handlers.performance.torch_compile import (
    CompiledForward,
    compile_arguments,
    try_to_compile,
)

logger = logging.getLogger(__name__)

_IMAGE_WEIGHTS = 4  # dimensions: channels out, channels in, height, width


@dataclass
class OptimizedModel:
    """A model that was made faster, and what its ``forward`` is made of now."""

    model: Any  # the same object, but for one that torch.compile has
    options: Optimization
    sizes: BatchSizes
    reference: nn.Module | None = None  # a copy in fp32, until it was compared with
    compiled: CompiledForward | None = None
    graphs: CudaGraphs | None = None
    fixed: FixedSizes | None = None
    accuracy: Accuracy | None = None  # None until it is known
    compilation: Compilation | None = None  # what describe tells of it

    def describe(self) -> dict[str, Any]:
        """Say what was done and found, for a description of the model."""
        description = self.options.described()
        if self.accuracy is not None:
            description["accuracy"] = self.accuracy.described()
        if self.compilation is not None:
            description["compiled"] = self.compilation.described()
        return {SECTION: description}

    def warm_up(self, run: RunSamples) -> None:
        """Put the model through samples, for `marserve.backend.context.Context.warm_ups`.

        Raises:
            OptionRefused: Graphs cannot be recorded, or the model is not as accurate as wanted.
        """
        if self.compiled is not None and self.compilation is not None:
            self._compile(run, self.compiled, self.compilation)
        if self.graphs is not None and self.compilation is not None:
            self._record(run, self.graphs, self.compilation)
        if self.options.check_accuracy is not None:
            self._compare(run, self.options.check_accuracy)

    def _compile(
        self, run: RunSamples, compiled: CompiledForward, compilation: Compilation
    ) -> None:
        """Have all sizes compiled; a slower model is better than none."""
        sizes = self.sizes.to_compile()
        try:
            with compiled.foreseen(compilation.unforeseen):
                _run_each(run, sizes, compilation)
        except WarmUpFailed as error:
            compilation.fallback = _report_failure(run, compiled, error)
            return
        if self.fixed is not None:
            compilation.other_sizes = self.fixed.end_warm_up(sizes)
            compiled.end_warm_up(compilation.unforeseen)

    def _record(self, run: RunSamples, graphs: CudaGraphs, compilation: Compilation) -> None:
        sizes = self.sizes.to_record()
        try:
            _run_each(run, sizes, compilation)
        except WarmUpFailed as error:
            raise OptionRefused(f"{SECTION}.cuda_graphs: nothing is recorded: {error}") from error
        graphs.end_warm_up()
        if self.fixed is not None:
            compilation.other_sizes = self.fixed.end_warm_up(sizes)

    def _compare(self, run: RunSamples, goal: AccuracyGoal) -> None:
        """Run the samples through both models."""
        assert self.reference is not None
        forward = self.model.forward
        self.model.forward = comparison = Comparison(self.reference, forward)
        try:
            for file in goal.samples or ("",):
                run(1, file)
        except WarmUpFailed as error:
            raise OptionRefused(f"{SECTION}.check_accuracy: {error}") from error
        finally:
            self.model.forward, self.reference = forward, None
        self.accuracy = comparison.accuracy
        logger.info("Against fp32: %s", self.accuracy)
        self.accuracy.check(goal)


def _run_each(run: RunSamples, sizes: tuple[int, ...], compilation: Compilation) -> None:
    for size in sizes:
        started = time.perf_counter()
        run(size)
        seconds = time.perf_counter() - started
        logger.info("Batch size %d: first run %.1f s", size, seconds)
        compilation.add(size, seconds)


def _report_failure(run: RunSamples, compiled: CompiledForward, error: WarmUpFailed) -> str:
    """Find out who is at fault: the compiler, or the sample, which may not be meant for the model.

    Without the compiler the model is served as it is. Without a sample it is compiled later.
    """
    try:
        with compiled.switched_off():
            run()
    except WarmUpFailed:
        logger.warning("Nothing can be compiled before the first requests come: %s", error)
        return f"compiled as requests come: {error}"
    compiled.give_up()
    logger.warning("Compiling failed; the model is served uncompiled.")
    return f"served uncompiled: {error}"


def refuse_optimization(config: Mapping[str, Any]) -> None:
    """Refuse to optimize a model that is no eager one, if that is asked for."""
    if config.get(SECTION) is not None:
        raise OptionRefused(
            f"{SECTION} needs an eager model (--model-file): TorchScript, ONNX and exported "
            "programs have the precision and layout that they were saved with."
        )


def made_in(options: Optimization | None, make: Callable[[], Any]) -> Callable[[], Any]:
    """Have a model made in its precision before its weights are loaded, if nothing needs fp32.

    Weights that were cast when they were packed are then used as they lie in the file.
    """
    if options is None or not options.is_low or options.matmul_only:
        return make
    if options.fold_batch_norm or options.check_accuracy is not None:
        return make
    return lambda: make().to(options.dtype)


def optimize(model: Any, context: Context, device: torch.device) -> OptimizedModel | None:
    """Make an eager model faster; None where nothing is asked for, or nothing can be done.

    The model is in evaluation mode, on the device where inputs come from and results go to.

    Raises:
        OptionRefused: Something that the section ``optimization`` asks for cannot be done.
    """
    config = getattr(context, "model_yaml_config", None) or {}
    options, arguments = read_optimization(config), compile_arguments(config.get("pt2"))
    if options is None and arguments is None:
        return None
    optimized = OptimizedModel(model, options or Optimization(), BatchSizes.of(context))
    _check_feasible(optimized.options, device, is_compiled=arguments is not None)
    _change_weights(optimized)
    if arguments is not None:
        if optimized.sizes.compiled:
            arguments = {"dynamic": False, **arguments}
        _compile_lazily(optimized, arguments)
    _change_forward(optimized, device)
    if optimized.graphs is not None:
        optimized.compilation = Compilation({"by": "cuda_graphs"}, optimized.graphs.__len__)
    if optimized.compilation is not None:
        context.describe_compiled = optimized.compilation.described
    return optimized if options or optimized.compiled else None


def _compile_lazily(optimized: OptimizedModel, arguments: dict[str, Any]) -> None:
    """Have torch compile the model, when it is called."""
    compilation = Compilation(compile_options(arguments), compiled_graphs)
    compilation.other_sizes = "run by the same code, or compiled as they come"
    optimized.compilation = compilation
    model = optimized.model
    compiled = try_to_compile(model, arguments)
    if compiled is None:
        compilation.fallback = "served uncompiled: torch.compile refused; the model's log tells why"
        return
    forward = CompiledForward(model, compiled.forward)
    compiled.forward = optimized.compiled = forward
    optimized.model = compiled


def _check_feasible(options: Optimization, device: torch.device, *, is_compiled: bool) -> None:
    if is_compiled and (options.cuda_graphs or options.device_stages):
        raise OptionRefused(
            f"{SECTION}: cuda_graphs and device_stages exclude pt2.compile, which has a mode "
            "reduce-overhead for the first."
        )
    if options.cuda_graphs and device.type != "cuda":
        raise OptionRefused(
            f"{SECTION}.cuda_graphs needs a CUDA device; this worker is on {device}."
        )
    for each in options.device_stages:  # before half of the model is on others
        try:
            torch.empty(1, device=each)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise OptionRefused(f"{SECTION}.device_stages: no {each} here: {reason}") from None


def _change_weights(optimized: OptimizedModel) -> None:
    options, model = optimized.options, optimized.model
    if options.check_accuracy is not None:
        optimized.reference = _copy_of(model)
    if options.fold_batch_norm:
        _fold(model)
    if options.is_low:
        lower_weights(model, options.dtype, matmul_only=options.matmul_only)
    if options.channels_last:
        if not any(weight.dim() == _IMAGE_WEIGHTS for weight in model.parameters()):
            raise OptionRefused(
                f"{SECTION}.channels_last: this model has no convolution over images."
            )
        model.to(memory_format=torch.channels_last)


def _copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise OptionRefused(
            f"{SECTION}.check_accuracy needs a copy of the model, and there is none: {error}"
        ) from error


def _fold(model: nn.Module) -> None:
    count = fold_batch_norms(model)
    if not count:
        raise OptionRefused(
            f"{SECTION}.fold_batch_norm: no batch norm of this model follows a convolution that "
            "nothing else uses."
        )
    logger.info("%d batch norms became part of convolutions.", count)


def _change_forward(optimized: OptimizedModel, device: torch.device) -> None:
    options, model = optimized.options, optimized.model
    if options.device_stages:
        forward: Forward = _device_stages(model, options, device)
    else:
        forward = _with_autocast(model.forward, options, device)
    if options.cuda_graphs:
        forward = optimized.graphs = CudaGraphs(forward)
    forward = _with_casts(forward, options)
    if optimized.graphs or (optimized.compiled and optimized.sizes.compiled):
        forward = optimized.fixed = FixedSizes(forward)
    if forward != model.forward:
        model.forward = forward


def _device_stages(model: nn.Module, options: Optimization, home: torch.device) -> DeviceStages:
    devices = options.device_stages
    parts = partition_stages(stages_of(model), len(devices))
    stages = [
        (_with_autocast(part.to(device), options, device), device)
        for part, device in zip(parts, devices, strict=True)
    ]
    return DeviceStages(stages, home)


def _with_autocast(forward: Forward, options: Optimization, device: torch.device) -> Forward:
    return autocast(forward, device, options.dtype) if options.matmul_only else forward


def _with_casts(forward: Forward, options: Optimization) -> Forward:
    dtype = options.dtype if options.is_low and not options.matmul_only else None
    if dtype is not None or options.channels_last:
        forward = cast_inputs(forward, dtype, channels_last=options.channels_last)
    return raise_outputs(forward) if options.is_low else forward
