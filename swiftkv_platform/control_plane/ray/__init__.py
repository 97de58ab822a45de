"""Ray's dashboard over HTTP and places on its nodes, for jobs and deployments alike."""

__all__ = ["dashboard", "places"]
