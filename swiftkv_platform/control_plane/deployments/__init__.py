"""Served models: their rules, rows and routes, and the reconciler that has Ray Serve run them."""

__all__ = ["deployment", "rows"]
