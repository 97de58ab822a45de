"""Distillation of a SwiftKV student from its teacher: losses, training loop, checkpoints. Independent of Ray, the
object store and trackers, which `jobs` passes in through protocols.
"""
