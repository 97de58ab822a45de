"""The control plane: jobs, models, deployments and files of tenants over HTTP, one package per subject.

The modules of this package itself put the subjects together.
"""
