"""What handlers get of the models that they call with ``context.infer``; for ``except`` clauses."""

from marserve.backend.model_answers import ModelAnswer, ModelCallFailed

__all__ = ["ModelAnswer", "ModelCallFailed"]
