"""Computations of an attempt, each in a Ray task or a Ray Train worker. They know neither the driver nor its tasks."""
