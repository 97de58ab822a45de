"""Distillation of a SwiftKV student from its teacher: data, losses, the training step, checkpoints. Imports no cluster,
object store or tracker code; `jobs` passes those in through protocols.
"""
