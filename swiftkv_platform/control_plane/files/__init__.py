"""Uploaded files that jobs train on."""

__all__ = ["file", "rows"]
