"""Bytes that a job reads and writes: teacher, rows, calibrated start, checkpoints, artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from swiftkv_platform.planning.architecture import Architecture
from swiftkv_platform.planning.job_setup import training_setup
from swiftkv_platform.planning.kv_cache import DTYPE_BYTES
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.parameters import served_parameters
from swiftkv_platform.planning.prefill import dense_layer_map
from swiftkv_platform.planning.serving import weights_bytes
from swiftkv_platform.planning.training_memory import WIDE
from swiftkv_platform.specs import JobSpec

MAX_SHARD_BYTES = 2 << 30
"""Most bytes of a weight file that a job writes, unless a single tensor is larger."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of text per token."""

_NARROW_VOCABULARY = 1 << 16
"""Largest vocabulary whose ids take two bytes."""

Origin = Literal["hub", "store", "node"]
"""Location of a teacher: on the hub, at an `s3://` address, or already on every node."""


@dataclass(frozen=True)
class Inputs:
    """Teacher and data of a job."""

    teacher: Origin = "node"
    text_bytes: int | None = None
    """Bytes of all data sources; None if unknown."""
    num_tokens: int | None = None
    """Tokens of an epoch, if known better than from `text_bytes`."""

    @property
    def tokens(self) -> int | None:
        """Tokens of an epoch; None if unknown."""
        if self.num_tokens is not None or self.text_bytes is None:
            return self.num_tokens
        return self.text_bytes // BYTES_PER_TOKEN


@dataclass(frozen=True)
class Volumes:
    """Bytes by kind of file."""

    teacher: int
    """The teacher's weight files."""
    text: int
    rows: int
    """Prepared rows. Like `text`, 0 if the data are unknown."""
    start: int
    """The calibrated start; 0 for a copied one."""
    trained: int
    """Trained tensors in float32."""
    checkpoint: int
    """Trained tensors, and the optimizer's state."""
    artifact: int
    """The student's weight files, with the teacher's projections unless layers were trained."""


def volumes(
    spec: JobSpec, config: Mapping[str, Any], model: Architecture, layer_map: LayerMap, inputs: Inputs
) -> Volumes:
    """Bytes of a job whose defaults are resolved."""
    narrow = DTYPE_BYTES[spec.model.dtype]
    setup = training_setup(spec)
    own = replace(setup, trainable="qkv").student_parameters(model, layer_map)
    trained = setup.student_parameters(model, layer_map).trained
    exported = own.total
    if setup.trainable != "qkv":
        exit_head = setup.early_exit * (model.vocab_size + 1) * model.hidden_size
        exported = sum(served_parameters(model, layer_map, decodes_own=setup.decodes_own)) + exit_head
    moments = 1 if spec.optimizer.name == "muon" else 2
    tokens = inputs.tokens or 0
    return Volumes(
        teacher=_stored_teacher(config, model),
        text=inputs.text_bytes if inputs.text_bytes is not None else BYTES_PER_TOKEN * tokens,
        rows=tokens * (3 if model.vocab_size <= _NARROW_VOCABULARY else 5),
        start=narrow * own.trained if spec.swiftkv.is_calibrated else 0,
        trained=WIDE * trained,
        checkpoint=WIDE * (1 + moments) * trained,
        artifact=narrow * exported,
    )


def _stored_teacher(config: Mapping[str, Any], model: Architecture) -> int:
    """Return the bytes of a teacher's files in its configuration's dtype; quantised layers take a byte per
    parameter."""
    dtype = model.dtype if model.dtype in DTYPE_BYTES else "bfloat16"
    return weights_bytes(model, dense_layer_map(model), "fp8" if config.get("quantization_config") else dtype)
