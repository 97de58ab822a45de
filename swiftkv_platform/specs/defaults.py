"""Defaults of a job spec that depend on the model and the data: row length, learning rate, batch size. Pure functions,
so every attempt of a job gets the same. Imports no torch.
"""

from __future__ import annotations

from swiftkv_platform.specs import JobSpec

BATCH_SIZE = 32
"""Rows of a step if there are enough (paper, appendix B.1)."""
FEWEST_STEPS = 400
"""Fewest steps of a run before the default batch is made smaller; docs/performance.md has the gain."""
LEARNING_RATE, FULL_WIDTH = 3e-4, 2048
"""The paper's rate, for models of at least this hidden size."""
HIGHEST_LEARNING_RATE = 3e-3
SHARE_FOR_ALL_LAYERS = 1 / 3
"""Factor on the rate if every layer is trained: the lower ones are good already."""


def resolve_defaults(spec: JobSpec, *, context_length: int | None, hidden_size: int) -> JobSpec:
    """Return the spec with the defaults that depend on the model. Rows are at most as long as its context. The learning
    rate, if not given, is inversely proportional to its hidden size, and lower if all layers are trained; the rate
    search, if any, starts from it. `context_length`: the model's `max_position_embeddings`, or None if its
    configuration has none."""
    length = min(spec.data.max_length, context_length or spec.data.max_length)
    length -= length % spec.sharding.sequence_parallel_size
    rate, searches = spec.optimizer.learning_rate, spec.optimizer.rate_search
    if rate is None:
        searches = searches is not False
        rate = min(LEARNING_RATE * max(1.0, FULL_WIDTH / hidden_size), HIGHEST_LEARNING_RATE)
        rate *= SHARE_FOR_ALL_LAYERS if spec.distillation.trainable == "all" else 1.0
    data = spec.data.model_copy(update={"max_length": length})
    optimizer = spec.optimizer.model_copy(update={"learning_rate": rate, "rate_search": searches})
    return spec.model_copy(update={"data": data, "optimizer": optimizer})


def resolve_batch_size(spec: JobSpec, num_rows: int) -> JobSpec:
    """Return the spec with a batch size: 32, halved while `num_epochs` over the rows make fewer than 400 steps, and a
    multiple of the rows that the workers take in one pass."""
    training = spec.training
    if training.batch_size is not None:
        return spec
    per_pass = spec.rows_per_pass
    size = BATCH_SIZE
    if training.max_steps is None:
        while size > 1 and num_rows * training.num_epochs < FEWEST_STEPS * size:
            size //= 2
    size = max(size // per_pass, 1) * per_pass
    return spec.model_copy(update={"training": training.model_copy(update={"batch_size": size})})
