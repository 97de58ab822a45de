"""Runs the model for scheduled sequences and keeps their KV caches. Any causal language model of transformers will do;
it does not know whether that model skips layers, it counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from swiftkv_platform.engine.sequence import Sequence


class ModelRunner:
    """A model and the caches of the sequences that run on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._caches: dict[str, Cache] = {}
        self._num_tokens_in_last_layer = 0
        layers: Any = model.base_model.layers
        layers[-1].register_forward_pre_hook(self._count_tokens)

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    @property
    def num_caches(self) -> int:
        """Sequences whose KV is in memory."""
        return len(self._caches)

    @torch.inference_mode()
    def run(self, sequences: Iterable[Sequence]) -> list[torch.Tensor]:
        """Logits of each sequence's next token, [vocab_size] each.

        The first time a sequence is run its whole prompt is (prefill), afterwards its last token (decode).
        """
        return [self._run(sequence) for sequence in sequences]

    def release(self, sequence: Sequence) -> None:
        """Free the sequence's cache, if it has one."""
        self._caches.pop(sequence.request_id, None)

    def _run(self, sequence: Sequence) -> torch.Tensor:
        prefill = sequence.num_computed_tokens == 0
        token_ids = sequence.prompt_token_ids if prefill else [sequence.last_token_id]
        outputs = self._model(
            input_ids=torch.tensor([token_ids], device=self.device),  # [1, num_tokens]
            past_key_values=self._caches.get(sequence.request_id),
            use_cache=True,
            logits_to_keep=1,
        )
        self._caches[sequence.request_id] = outputs.past_key_values
        sequence.num_computed_tokens += len(token_ids)
        if prefill:
            sequence.num_prefill_layers_skipped_tokens = len(token_ids) - self._num_tokens_in_last_layer
        logits: torch.Tensor = outputs.logits[0, -1]  # [vocab_size]
        return logits

    def _count_tokens(self, _layer: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden: torch.Tensor = arguments[0]  # [1, num_tokens, hidden_size]
        self._num_tokens_in_last_layer = hidden.shape[1]
