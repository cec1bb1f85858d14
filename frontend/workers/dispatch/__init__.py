"""The dispatch of batches to a worker that is READY: one strategy in each file.

``batched`` has the base class and the default; ``dispatch_batches`` in ``outstanding`` chooses
between the two strategies that send complete batches; ``stateful`` has each strategy for sequences.
"""
