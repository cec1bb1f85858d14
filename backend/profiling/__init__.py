"""Batches that are run before the traffic comes: to warm a model up, and to learn what they cost.

* ``warm_up``       what a handler wants run before the worker is ready
* ``batch_sizes``   what a batch of each size costs in time and memory
* ``memory``        how much memory batches take, and how much there is
* ``sample_input``  the input that such batches are made of
"""
