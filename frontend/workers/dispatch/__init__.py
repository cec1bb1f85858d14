"""How a worker that is READY is given its batches: one strategy per file.

``batched`` holds what all share, and the default; ``dispatch_batches`` in ``outstanding`` chooses
between the two that send whole batches.
"""
