"""Fixtures of a real model version."""

from served_models import answers_to, ask, serve_model

__all__ = ["answers_to", "ask", "serve_model"]
