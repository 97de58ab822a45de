"""HTTP code that every room's routes share."""

__all__ = ["answers", "changes", "clients", "turns"]
