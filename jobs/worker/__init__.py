"""Computations of an attempt, each run in a Ray task or a Ray Train worker. Independent of the driver and its tasks."""
