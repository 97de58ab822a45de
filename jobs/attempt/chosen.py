"""The checkpoint that a model is made of, which need not be the last. Knows keys and manifests; loads no torch."""

from __future__ import annotations

from collections.abc import Iterator

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.artifacts import is_complete, read_manifest
from swiftkv_platform.storage.object_store import ObjectStore, join_key

CHOSEN_STEP = "chosen_step"
"""Entry of a checkpoint's lineage: step of the state that the model is made of, were training to end there; null is the
checkpoint's own."""
ENDED = "ended"
"""Entry of a checkpoint's lineage: whether training has ended, whatever its step."""


def model_checkpoint(store: ObjectStore, attempt: AttemptId, last: str) -> str:
    """Key of the checkpoint that the model is made of: the one whose step the `last` one's manifest names; the last one
    itself where that could not be stored."""
    lineage = read_manifest(store, last).lineage
    chosen = lineage.get(CHOSEN_STEP)
    if chosen is None or chosen == lineage["step"]:
        return last
    key = next(checkpoints_of_step(store, attempt, chosen), None)
    if key is None:
        get_logger().warning("best_checkpoint_lost", step=chosen)
    return key or last


def finished_before(store: ObjectStore, request: AttemptRequest, total_steps: int) -> str | None:
    """The checkpoint that the model is made of, if the one to resume from is that of a run's end, or no step is to
    follow the one to continue from: then there is nothing left to train."""
    if total_steps == 0:
        assert request.parent is not None, "a spec without a parent trains"
        return request.parent.key
    if request.resume_from is None:
        return None
    lineage = read_manifest(store, request.resume_from).lineage
    if int(lineage["step"]) < total_steps and not lineage.get(ENDED):
        return None
    return model_checkpoint(store, request.attempt_id, request.resume_from)


def checkpoints_of_step(store: ObjectStore, attempt: AttemptId, step: int) -> Iterator[str]:
    """Keys of the complete checkpoints of a step, those of the newest attempt first."""
    for one in reversed(attempt.so_far()):
        yield from own_checkpoints_of_step(store, one, step)


def own_checkpoints_of_step(store: ObjectStore, attempt: AttemptId, step: int) -> Iterator[str]:
    """Keys of an attempt's complete checkpoints of a step."""
    prefix = attempt.checkpoints_prefix
    for name in store.list_directories(prefix):
        key = join_key(prefix, name)
        if name.startswith(f"step-{step:08d}-") and is_complete(store, key):
            yield key
