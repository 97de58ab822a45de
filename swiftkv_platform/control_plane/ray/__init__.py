"""Ray's dashboard over HTTP, for jobs and deployments alike."""

__all__ = ["dashboard"]
