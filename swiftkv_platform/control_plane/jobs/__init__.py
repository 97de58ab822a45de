"""Distillation jobs: their rules, rows and routes, and the reconciler that runs them on a Ray cluster."""
