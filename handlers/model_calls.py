"""The answer and the exception of ``context.infer``, for handlers that call other models."""

from marserve.backend.model_answers import ModelAnswer, ModelCallFailed

__all__ = ["ModelAnswer", "ModelCallFailed"]
