"""Distillation of a SwiftKV student from its teacher: data, losses, the training step, evaluation. Knows no cluster, no
object store and no tracker; those reach it through protocols that `jobs` wires.
"""
