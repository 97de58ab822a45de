"""Deployments: their rules, rows and routes, and the reconciler that runs them on Ray Serve."""
