"""transformers' `generate()` for SwiftKV models: cache, chunked prefill, early exit (paper, appendix E).

The decoding loops are transformers' own. `generate()` accepts two more arguments, or entries of a generation
configuration: `kv_cache_dtype` ("auto", "fp8", "int8") and `early_exit` (a mode's name, an `EarlyExit` or its fields).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import StoppingCriteriaList
from transformers.generation.configuration_utils import ALL_STATIC_CACHE_IMPLEMENTATIONS, GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model.cache import get_payload_dtype, get_stored_dtype, make_cache
from swiftkv_platform.model.context import TokenSelection, supports_selection
from swiftkv_platform.specs.sampling import EarlyExit


def compute_exit_confidence(logits: torch.Tensor) -> torch.Tensor:
    """Return the max probability per row of the exit head's logits [..., vocab_size], at temperature 1 without logits
    processors. A row exits if it reaches the threshold."""
    return logits.float().softmax(-1).amax(-1)


class ThresholdExits:
    """Selects the rows that exit in each step and counts their tokens. A step calls `select_rows`, `merge_logits` and
    `finish_step`."""

    def __init__(self, threshold: float, exit_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._threshold, self._exit_logits = threshold, exit_logits
        self.num_exited_tokens: torch.Tensor | None = None
        """Number of exited tokens per row, int64 [batch], without tokens after a row's end."""
        self._logits: torch.Tensor | None = None
        self._exited: torch.Tensor | None = None
        self._running: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def select_rows(self, x: torch.Tensor) -> TokenSelection:
        """Select the last token of the rows that do not exit, from layer l's input `x` [batch, num_tokens,
        hidden_size]."""
        self._logits = self._exit_logits(x[:, -1:])  # [batch, 1, vocab_size]
        self._exited = compute_exit_confidence(self._logits[:, 0]) >= self._threshold
        self._rows = (~self._exited).nonzero().squeeze(1) if bool(self._exited.any()) else None
        return TokenSelection(1, rows=self._rows)

    def select_without_exits(self, x: torch.Tensor) -> TokenSelection:
        """Select the last token of all rows of `x` [batch, num_tokens, hidden_size]: no row exits in this step."""
        self._exited, self._rows = torch.zeros(len(x), dtype=torch.bool, device=x.device), None
        return TokenSelection(1)

    def merge_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all rows [batch, 1, vocab_size] from those of the selected rows [num_rows, 1,
        vocab_size]."""
        if self._rows is None:
            return logits
        assert self._logits is not None, "call `select_rows` first"
        return self._logits.index_copy(0, self._rows, logits)

    def finish_step(self, done: torch.Tensor) -> None:
        """Count the step's exited tokens. `done`: rows that end with this step, bool [batch]."""
        assert self._exited is not None, "call `select_rows` first"
        if self.num_exited_tokens is None or self._running is None:
            self.num_exited_tokens = torch.zeros_like(done, dtype=torch.long)
            self._running = torch.ones_like(done)
        self.num_exited_tokens += self._exited.to(done.device) & self._running
        self._running &= ~done


class _WatchedCriteria(StoppingCriteriaList):
    def __init__(self, exits: ThresholdExits, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self._exits = exits

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        done: torch.Tensor = super().__call__(*args, **kwargs)
        self._exits.finish_step(done)
        return done


@dataclass
class EarlyExitOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(..., early_exit=..., return_dict_in_generate=True)`."""

    num_exited_tokens: torch.Tensor | None = None
    """Number of generated tokens of each row that came from the exit head, [batch]."""


class SwiftKVGenerationMixin(nn.Module):
    """Mixin for a family's causal language model that overrides hooks of transformers' `generate()`."""

    config: Any
    model: Any
    exit_logits: Any

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Add `kv_cache_dtype` and `early_exit` to the configuration; arguments override its entries."""
        given = {name: kwargs.pop(name, None) for name in ("kv_cache_dtype", "early_exit")}
        family: Any = super()
        generation_config, model_kwargs = family._prepare_generation_config(generation_config, **kwargs)
        for name, value in given.items():
            if value is not None:
                setattr(generation_config, name, value)
        get_payload_dtype(_get_kv_cache_dtype(generation_config))
        generation_config.early_exit = EarlyExit.parse(getattr(generation_config, "early_exit", None))
        return generation_config, model_kwargs

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, arguments: Any) -> None:
        family: Any = super()
        family._validate_generation_mode(generation_mode, generation_config, arguments)
        if generation_config.assistant_early_exit is not None:
            raise InvalidInputError(
                "assistant_early_exit cuts a model at any layer, but a SwiftKV model exits only at layer l; use "
                "early_exit='threshold'",
                field="assistant_early_exit",
                value=generation_config.assistant_early_exit,
            )
        self._check_early_exit(generation_mode, generation_config)

    def _check_early_exit(self, generation_mode: Any, generation_config: Any) -> None:
        mode = generation_config.early_exit.mode
        if mode == "off":
            return
        refusal = None
        if mode == "lossless":
            refusal = "needs swiftkv_platform.engine, which drafts and verifies; generate() accepts off or threshold"
        elif not self.config.shape.has_exit_head:
            refusal = "needs an exit head, which this model lacks; convert it with early_exit=True"
        elif not self.model.swiftkv_enabled:
            refusal = "works only in student mode; call model.swiftkv(True)"
        elif not supports_selection(self.config, TokenSelection(1)):
            refusal = f"needs eager, sdpa or flash attention, not {self.config._attn_implementation}"
        elif generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            refusal = f"works with greedy search and sampling, not with {generation_mode.value}"
        elif generation_config.output_hidden_states or generation_config.output_attentions:
            refusal = "skips layers whose hidden states or attentions were requested; request one or the other"
        if refusal is not None:
            raise InvalidInputError(f"early_exit={mode!r} {refusal}", field="early_exit", value=mode)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Pass `generate()` a cache of `num_kv_cache_layers` layers instead of one of L."""
        kv_cache_dtype = _get_kv_cache_dtype(generation_config)
        wanted = get_payload_dtype(kv_cache_dtype)
        given = model_kwargs.get("past_key_values")
        if given is not None and wanted not in (None, get_stored_dtype(given)):
            _refuse_cache("kv_cache_dtype", kv_cache_dtype, "differs from past_key_values; leave one of them out")
        if generation_config.use_cache is False and wanted is not None:
            _refuse_cache("kv_cache_dtype", kv_cache_dtype, "needs a cache; leave out use_cache=False")
        without_cache = generation_config.use_cache is False
        if self.config.layer_map.deep_leaders and (without_cache or self.config.shape.swiftkv_deep_tail > 1):
            # Without a cache each pass recomputes the generated tokens, which are deep. With one, a chunk of the prompt
            # may hold part of the deep tail.
            model_kwargs["prompt_length"] = _get_prompt_length(generation_config, model_kwargs)
        plain_teacher = not self.model.swiftkv_enabled and wanted is None
        if given is not None or generation_config.use_cache is False or plain_teacher:
            family: Any = super()
            family._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        max_cache_len = None
        implementation = generation_config.cache_implementation or "dynamic"
        if implementation in ALL_STATIC_CACHE_IMPLEMENTATIONS and "offloaded" not in implementation:
            max_cache_len = max(max_cache_length, generation_config.max_cache_len or 0)
        elif implementation != "dynamic":
            _refuse_cache(
                "cache_implementation",
                implementation,
                "has one layer for each layer of the model; dynamic and static are accepted, and kv_cache_dtype='fp8' "
                "or 'int8' for less memory",
            )
        cache = make_cache(
            self.config, swiftkv=self.model.swiftkv_enabled, kv_cache_dtype=kv_cache_dtype, max_cache_len=max_cache_len
        )
        if generation_config.is_assistant:
            cache.activate_past_recording()  # its drafts may have to be rolled back
        model_kwargs["past_key_values"] = cache

    @staticmethod
    def create_masks_for_generate(*, attention_mask: torch.Tensor | None, **_: Any) -> torch.Tensor | None:
        """Return the mask unchanged: the forward pass makes masks itself, by layer and the cache layer it reads."""
        return attention_mask

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Prefill. With `prefill_chunk_size`, all chunks but the last stop at layer l."""
        family: Any = super()
        chunk_size, cache = generation_config.prefill_chunk_size, model_kwargs.get("past_key_values")
        if chunk_size is not None and cache is not None:
            generation_config = copy.copy(generation_config)
            generation_config.prefill_chunk_size = None
            embeddings = model_kwargs.get("inputs_embeds") if kwargs.get("is_first_iteration", True) else None
            input_ids = self._prefill_chunks(input_ids, embeddings, generation_config, model_kwargs, chunk_size)
        return family._prefill(input_ids, generation_config, model_kwargs, **kwargs)

    def _prefill_chunks(
        self,
        input_ids: torch.Tensor,
        embeddings: torch.Tensor | None,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        chunk_size: int,
    ) -> torch.Tensor:
        """Run the prompt up to its last chunk. Returns the remaining token ids; the caller slices embeddings."""
        cache, mask = model_kwargs["past_key_values"], model_kwargs.get("attention_mask")
        position_ids = model_kwargs.get("position_ids")
        seen = int(cache.get_seq_length())
        tokens = input_ids if embeddings is None else embeddings
        # With a filled cache the caller passes the whole prompt or only its new tokens: the mask's length tells which.
        mask_length = _get_prompt_length(generation_config, model_kwargs)
        new = tokens[:, seen:] if embeddings is not None or mask_length == tokens.shape[1] else tokens
        num_run = (new.shape[1] - 1) // chunk_size * chunk_size
        first_position = 0 if position_ids is None else position_ids.shape[-1] - new.shape[1]
        for start in range(0, num_run, chunk_size):
            end = start + chunk_size
            positions = position_ids
            if position_ids is not None:
                positions = position_ids[..., first_position + start : first_position + end]
            self(
                **{"input_ids" if embeddings is None else "inputs_embeds": new[:, start:end]},
                attention_mask=None if mask is None else mask[:, : seen + end],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                prompt_length=model_kwargs.get("prompt_length", seen + new.shape[1]),
                logits_to_keep=torch.empty(0, dtype=torch.long, device=new.device),
            )
        return input_ids if embeddings is not None else new[:, num_run:]

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Run greedy search or sampling, with early exit if enabled."""
        family: Any = super()
        if generation_config.early_exit.mode == "off":
            return family._sample(input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)
        exits = ThresholdExits(generation_config.early_exit.threshold, self.exit_logits)
        output = family._sample(
            input_ids,
            logits_processor,
            _WatchedCriteria(exits, stopping_criteria),
            generation_config,
            exits=exits,
            **model_kwargs,
        )
        if not generation_config.return_dict_in_generate:
            return output
        return EarlyExitOutput(**output, num_exited_tokens=exits.num_exited_tokens)

    def init_continuous_batching(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `ModelError`: the paged cache of continuous batching has one layer per model layer."""
        raise ModelError(
            "transformers' continuous batching keeps a cache layer for each model layer; "
            "swiftkv_platform.engine.LLMEngine batches this model",
            field="cache_implementation",
            value="paged",
        )


def _get_prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """Return the prompt's number of tokens, including padding. transformers drops masks without padding."""
    mask = model_kwargs.get("attention_mask")
    return int(getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1])


def _get_kv_cache_dtype(generation_config: Any) -> str:
    return getattr(generation_config, "kv_cache_dtype", None) or "auto"


def _refuse_cache(field: str, value: str, why: str) -> NoReturn:
    raise InvalidInputError(f"{field}={value!r} {why}", field=field, value=value)
