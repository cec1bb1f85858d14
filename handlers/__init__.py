"""The library of model authors: handlers and their helpers.

File names are TorchServe's, because manifests contain them. Only handlers that need torch,
torchvision or PIL import them.
"""

if __name__ != "marserve.handlers":
    raise ImportError("import marserve.handlers, not the bare folder name")
