"""TorchServe's helpers for PiPPy, refused.

PiPPy was taken up into torch as ``torch.distributed.pipelining``, with another interface, and its
own package is no longer maintained. An archive that asks for it learns so when it loads.
"""

raise ImportError(
    "PiPPy is no longer developed and not supported: use torch.distributed.pipelining in the "
    "handler, with parallelType: pp in model-config.yaml"
)
