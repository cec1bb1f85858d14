"""Optimizes an eager model in place, as model-config.yaml says.

The model stays the same object; only torch.compile replaces it, as in TorchServe. Its ``forward``
is wrapped, from the inside out:

    the original, with folded batch norms, in its precision and layout; compiled, or in stages
    → autocast → CUDA graphs → casts of inputs and outputs
    → batches filled up to the sizes of the warm-up

The warm-up runs samples of the handler's input before the worker is ready: each batch size once, so
that nothing is compiled or recorded during traffic, and the same samples through the model in fp32.
"""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from marserve.backend.context import Context, RunSamples
from marserve.backend.errors import OptionRefused
from marserve.backend.profiling.samples import WarmUpFailed
from marserve.handlers.performance.accuracy import Accuracy
from marserve.handlers.performance.batch_norm import fold_batch_norms
from marserve.handlers.performance.cuda_graphs import CudaGraphs
from marserve.handlers.performance.device_stages import DeviceStages, stages_of
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
    Compilation,
    CompiledForward,
    compilation_of,
    compile_arguments,
    load_warnings_of,
    try_to_compile,
)
from marserve.handlers.utils import yaml_config_of

logger = logging.getLogger(__name__)

_IMAGE_WEIGHTS = 4  # dimensions: channels out, channels in, height, width


@dataclass
class OptimizedModel:
    """An optimized model and the parts of its ``forward``."""

    model: Any
    options: Optimization
    sizes: BatchSizes
    reference: nn.Module | None = None  # a copy in fp32, until the comparison
    compiled: CompiledForward | None = None
    graphs: CudaGraphs | None = None
    fixed: FixedSizes | None = None
    accuracy: Accuracy | None = None  # None before the comparison
    compilation: Compilation | None = None
    load_warnings: list[str] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Return options and findings for the model's description."""
        description = self.options.described()
        if self.accuracy is not None:
            description["accuracy"] = self.accuracy.described()
        if self.compilation is not None:
            description["compiled"] = self.compilation.described()
        return {SECTION: description}

    def warm_up(self, run: RunSamples) -> None:
        """Run samples through the model, one of `Context.warm_ups`; raises OptionRefused."""
        if self.compilation is not None and self.compilation.fallback is None:
            self._run_sizes(run, self.compilation)
        if self.options.check_accuracy is not None:
            self._compare(run, self.options.check_accuracy)

    def _run_sizes(self, run: RunSamples, compilation: Compilation) -> None:
        """Run each batch size once, which compiles or records it."""
        compiled, graphs = self.compiled, self.graphs
        sizes = self.sizes.to_compile() if graphs is None else self.sizes.to_record()
        if compiled is not None and self.fixed is not None:
            compiled.foreseen = set()
        try:
            for size in sizes:
                started = time.perf_counter()
                run(size)
                compilation.add(size, time.perf_counter() - started)
        except WarmUpFailed as error:
            if compiled is None:
                reason = f"{SECTION}.cuda_graphs: nothing is recorded: {error}"
                raise OptionRefused(reason) from error
            compilation.fallback = _serve_anyway(run, compiled, error)
            if not compiled.is_on:
                self.load_warnings.append(f"pt2: {compilation.fallback}")
            return
        if self.fixed is None:
            return
        compilation.other_sizes = self.fixed.end_warm_up(sizes)
        if compiled is not None:
            compiled.end_warm_up()
        if graphs is not None:
            graphs.end_warm_up()

    def _compare(self, run: RunSamples, goal: AccuracyGoal) -> None:
        assert self.reference is not None
        accuracy, forward = Accuracy(), self.model.forward
        self.model.forward = accuracy.comparing(self.reference, forward)
        try:
            for file in goal.samples or ("",):
                run(1, file)
        except WarmUpFailed as error:
            raise OptionRefused(f"{SECTION}.check_accuracy: {error}") from error
        finally:
            self.model.forward, self.reference = forward, None
        self.accuracy = accuracy
        logger.info("Against fp32: %s", accuracy)
        accuracy.check(goal)


def _serve_anyway(run: RunSamples, compiled: CompiledForward, error: WarmUpFailed) -> str:
    """Give up compiling if the sample runs without it, else compile later; return the fallback."""
    compiled.foreseen = None
    compiled.is_on = False
    try:
        run()
    except WarmUpFailed:
        compiled.is_on = True
        logger.warning("Nothing can be compiled before the first requests come: %s", error)
        return f"compiled as requests come: {error}"
    logger.warning("Compiling failed; the model is served uncompiled.")
    return f"served uncompiled: {error}"


def refuse_optimization(config: Mapping[str, Any]) -> None:
    """Raise OptionRefused if the configuration has the section, for a model that is not eager."""
    if config.get(SECTION) is not None:
        raise OptionRefused(
            f"{SECTION} needs an eager model (--model-file): TorchScript, ONNX and exported "
            "programs have the precision and layout that they were saved with."
        )


def made_in(options: Optimization | None, make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a constructor of the model in its final precision, if nothing needs fp32 before.

    Weights that were cast when they were packed are then mapped, not copied.
    """
    if options is None or not options.is_low or options.matmul_only:
        return make
    if options.fold_batch_norm or options.check_accuracy is not None:
        return make
    return lambda: make().to(options.dtype)


def optimize(model: Any, context: Context, device: torch.device) -> OptimizedModel | None:
    """Optimize an eager model; None if nothing is configured, or torch refuses to compile.

    The model is in evaluation mode on ``device``, where inputs come from and results go to. An
    option that is not possible here raises `OptionRefused`.
    """
    config = yaml_config_of(context)
    options, arguments = read_optimization(config), compile_arguments(config.get("pt2"))
    if options is None and arguments is None:
        return None
    optimized = OptimizedModel(model, options or Optimization(), BatchSizes.of(context))
    optimized.load_warnings = load_warnings_of(context)
    _check_feasible(optimized.options, device, is_compiled=arguments is not None)
    _change_weights(optimized)
    if arguments is not None:
        if optimized.sizes.compiled:
            arguments = {"dynamic": False, **arguments}
        _compile_lazily(optimized, arguments)
    _change_forward(optimized, device)
    if optimized.graphs is not None:
        optimized.compilation = Compilation({"by": "cuda_graphs"}, optimized.graphs.count)
    if optimized.compilation is not None:
        context.describe_compiled = optimized.compilation.described
    return optimized if options or optimized.compiled else None


def _compile_lazily(optimized: OptimizedModel, arguments: dict[str, Any]) -> None:
    """Replace the model by one that torch compiles at its first call."""
    optimized.compilation = compilation = compilation_of(arguments)
    compilation.other_sizes = "run by the same code, or compiled as they come"
    model = optimized.model
    compiled = try_to_compile(model, arguments, optimized.load_warnings)
    if compiled is None:
        compilation.fallback = optimized.load_warnings[-1].removeprefix("pt2: ")
        return
    compiled.forward = optimized.compiled = CompiledForward(
        model, compiled.forward, compilation.unforeseen
    )
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
    for each in options.device_stages:  # before a part of the model is moved
        try:
            torch.empty(1, device=each)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise OptionRefused(f"{SECTION}.device_stages: no {each} here: {reason}") from None


def _change_weights(optimized: OptimizedModel) -> None:
    options, model = optimized.options, optimized.model
    if options.check_accuracy is not None:
        try:
            optimized.reference = copy.deepcopy(model)
        except Exception as error:
            raise OptionRefused(
                f"{SECTION}.check_accuracy cannot copy the model: {error}"
            ) from error
    if options.fold_batch_norm:
        count = fold_batch_norms(model)
        if not count:
            raise OptionRefused(
                f"{SECTION}.fold_batch_norm: no batch norm of this model follows a convolution "
                "that nothing else uses."
            )
        logger.info("%d batch norms became part of convolutions.", count)
    if options.is_low:
        lower_weights(model, options.dtype, matmul_only=options.matmul_only)
    if options.channels_last:
        if not any(weight.dim() == _IMAGE_WEIGHTS for weight in model.parameters()):
            raise OptionRefused(
                f"{SECTION}.channels_last: this model has no convolution over images."
            )
        model.to(memory_format=torch.channels_last)


def _change_forward(optimized: OptimizedModel, device: torch.device) -> None:
    options, model = optimized.options, optimized.model

    def autocasted(forward: Forward) -> Forward:
        return autocast(forward, device, options.dtype) if options.matmul_only else forward

    if options.device_stages:
        parts = stages_of(model, len(options.device_stages))
        stages = zip(parts, options.device_stages, strict=True)
        forward: Forward = DeviceStages([(autocasted(part.to(d)), d) for part, d in stages], device)
    else:
        forward = autocasted(model.forward)
    if options.cuda_graphs:
        forward = optimized.graphs = CudaGraphs(forward)
    dtype = options.dtype if options.is_low and not options.matmul_only else None
    if dtype is not None or options.channels_last:
        forward = cast_inputs(forward, dtype, channels_last=options.channels_last)
    if options.is_low:
        forward = raise_outputs(forward)
    if optimized.graphs is not None or (optimized.compiled and optimized.sizes.compiled):
        forward = optimized.fixed = FixedSizes(forward)
    if forward != model.forward:
        model.forward = forward
