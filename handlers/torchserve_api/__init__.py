"""TorchServe's Python API apart from handlers, for code that imports it from `ts`."""
