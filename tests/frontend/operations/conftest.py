"""A real model version for the dashboard."""

from served_models import serve_model

__all__ = ["serve_model"]
