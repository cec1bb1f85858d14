"""TorchServe's Python API beside its handlers, for code that imports it by the names of `ts`."""
