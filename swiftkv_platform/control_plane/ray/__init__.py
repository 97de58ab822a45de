"""Ray's dashboard over HTTP, and placement on Ray's nodes, for jobs and deployments."""
