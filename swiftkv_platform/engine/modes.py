"""An engine on a student in memory, in student or teacher mode. Its weights are not copied; they may be shards that
FSDP gathers layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swiftkv_platform.engine.llm_engine import LLMEngine
from swiftkv_platform.engine.loading import LoadedModel
from swiftkv_platform.model.attention import KeyValue, Rotation
from swiftkv_platform.model.context import DecoderContext, TokenSelection
from swiftkv_platform.model.conversion import make_dense_config
from swiftkv_platform.model.decoder import LENGTH_DEPENDENT_ROPE, read_rope_parameters
from swiftkv_platform.model.deep_tokens import Bypass
from swiftkv_platform.model.tokenizers import get_end_ids
from swiftkv_platform.specs.engine import EngineConfig

_IN_MEMORY_DIGEST = "in memory"
"""Digest of the weights. Cached blocks do not outlive the engine, so it need not be unique."""


@contextmanager
def open_engine(
    student: Any, tokenizer: Any, config: EngineConfig, *, swiftkv: bool, context_length: int
) -> Iterator[LLMEngine]:
    """Yield an engine on `student`, whose attention implementation is restored when the block ends.

    Args:
        swiftkv: True: student mode; False: teacher mode.
        context_length: max tokens of prompt and output together, see `has_constant_rotary_factors`.
    """
    own = student.config._attn_implementation
    model: Any = student if swiftkv else _TeacherModel(student)
    loaded = LoadedModel(
        config=model.config,
        tokenizer=tokenizer,
        eos_token_ids=get_end_ids(student.generation_config.eos_token_id),
        context_length=context_length,
        model=model,
        digest=_IN_MEMORY_DIGEST,
    )
    try:
        yield LLMEngine(loaded, config)
    finally:
        model.set_attn_implementation(own)


def has_constant_rotary_factors(config: Any, num_tokens: int) -> bool:
    """Whether all sequences of up to `num_tokens` tokens have the same rotary factors, as the engine requires. LongRoPE
    and dynamic RoPE have other factors for long sequences."""
    return all(
        num_tokens <= int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in read_rope_parameters(config).values()
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE
    )


class _TeacherDecoder:
    """The teacher's layers with the interface of a dense model's decoder, where l is the number of layers."""

    def __init__(self, decoder: Any, layer_map: Any) -> None:
        self._decoder = decoder
        self.layer_map = layer_map
        self.layers = decoder.layers
        self.embed_tokens = decoder.embed_tokens
        self.make_rotations = decoder.make_rotations

    @property
    def decoders(self) -> list[Any]:
        """The student's decoder, and the decoders with the original layers if the student's layers are trained."""
        functions = (self._decoder.run_teacher_lower, self._decoder.run_teacher_upper)
        owners = [getattr(function, "__self__", None) for function in functions]
        return [self._decoder, *(owner for owner in owners if owner is not None)]

    def run_lower(self, context: DecoderContext, _bypass: Bypass | None = None) -> torch.Tensor:
        """Run all layers. `_bypass` is ignored, since a teacher's tokens bypass no layers."""
        x = (self._decoder.run_teacher_lower or self._decoder.run_lower)(context)
        hidden: torch.Tensor = self._decoder.run_teacher_upper(x, context)
        return hidden

    def project_key_values(self, _x: torch.Tensor, _rotation: Rotation) -> list[KeyValue]:
        return []

    def run_student_upper(
        self,
        x: torch.Tensor,
        _context: DecoderContext,
        *,
        shared: Sequence[Any],
        selection: TokenSelection | None = None,
        deep: None = None,
    ) -> torch.Tensor:
        assert not shared, "a teacher's layers compute their own K and V"
        assert deep is None
        return x if selection is None else selection.select(x)


class _TeacherModel:
    """A student's teacher, with the attributes of a model that the engine uses."""

    def __init__(self, student: Any) -> None:
        self.config = make_dense_config(student.config)
        self.model = _TeacherDecoder(student.model, self.config.layer_map)
        self.lm_head = student.lm_head
        self.device, self.dtype = student.device, student.dtype

    def set_attn_implementation(self, name: str) -> None:
        for decoder in self.model.decoders:
            decoder.set_attn_implementation(name)
