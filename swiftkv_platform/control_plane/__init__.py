"""The control plane: jobs, models, deployments and files of tenants over HTTP, one room a subject."""
