"""The library of model authors: ready-made handlers and their helpers.

File names are TorchServe's, because manifests in the wild name them. Heavy imports (torch,
torchvision, PIL) stand at the top of the handler that needs them, nowhere else.
"""

if __name__ != "marserve.handlers":
    raise ImportError("import marserve.handlers, not the bare folder name")
