"""The language model around a SwiftKV decoder: heads, modes, loading and export. It knows no particular family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import modeling_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.adapters import readable
from swiftkv_platform.model.checkpoint import Checkpoint, hub_arguments
from swiftkv_platform.model.configuration import check_whole, read_config
from swiftkv_platform.model.decoder import SwiftKVDecoderMixin
from swiftkv_platform.model.exits import ExitStep, ThresholdExits
from swiftkv_platform.model.generation import SwiftKVGenerationMixin
from swiftkv_platform.model.loading import load_checked, open_checked
from swiftkv_platform.model.masks import can_select
from swiftkv_platform.model.selection import TokenSelection
from swiftkv_platform.model.stored_weights import StoredWeights

_NOT_COUNTED = -100
"""Label of a position that the loss leaves out."""


class SwiftKVForCausalLMMixin(SwiftKVGenerationMixin):
    """Mixed into a family's causal language model."""

    decoder_class: ClassVar[type[SwiftKVDecoderMixin]]
    # What the family's own causal language model brings.
    config: Any
    config_class: ClassVar[Any]
    lm_head: nn.Module
    loss_function: Any
    post_init: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        if config.early_exit:
            self.exit_norm = type(self.model.norm)(config.hidden_size, eps=config.rms_norm_eps)
            self.exit_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.num_key_value_layers == config.num_hidden_layers:
            # Dense: of a student's checkpoint it takes the teacher.
            self._keys_to_ignore_on_load_unexpected = [r"_swiftkv\.", r"^exit_(norm|head)\."]
        self.post_init()

    def swiftkv(self, enabled: bool = True) -> Self:
        """Student mode (True, the default after loading) or teacher mode (False): one set of weights serves both."""
        _check_mode(self.config, enabled)
        self.model.swiftkv_enabled = enabled
        return self

    def swiftkv_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters trained by default, by name: the q, k, v projections and norm of SwiftKV, and the exit head."""
        return {name: p for name, p in self.named_parameters() if "swiftkv" in name or name.startswith("exit_")}

    def exit_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the exit head on x, the hidden state after layer l - 1: [..., hidden_size] -> [..., vocab_size]."""
        if not self.config.early_exit:
            raise ModelError("this model has no exit head; convert it with early_exit=True", field="early_exit")
        logits: torch.Tensor = self.exit_head(self.exit_norm(x))
        return logits

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        early_exit: ThresholdExits | None = None,
        prompt_length: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, num_kept, vocab_size] of the positions `logits_to_keep` names (0: all), as in transformers.

        In student mode only the tokens at these positions run through layers >= l. Labels, hidden states and attentions
        concern all tokens, so with them every token does. With `early_exit`, which `generate()` passes, these are the
        logits of the last token, and rows may stop at layer l with those of the exit head.

        Of a student that keeps K and V of what it writes (`swiftkv_decode_key_value: own`), the last token of the
        prompt and all behind it are deep. `prompt_length`, padding included, says where that is, for all rows or each,
        [batch]; without it, it is before the first of `labels` that counts, else `logits_to_keep` names, by a number,
        the deep tokens, and 0 the last one alone.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if self.config.decodes_own and tokens is not None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            kwargs["first_deep"] = _first_deep(prompt_length, labels, logits_to_keep, tokens.shape[1], int(seen))
        step = None if early_exit is None else ExitStep(early_exit, self.exit_logits)
        kept: Any = None
        if step is not None:
            kept, logits_to_keep = step.choose, 0
        elif tokens is not None and labels is None and not self._records_every_token(kwargs):
            selection, among = _select_logits(logits_to_keep, tokens.shape[1])
            if selection is not None and can_select(self.config, selection):
                kept, logits_to_keep = selection, among
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            kept=kept,
            **kwargs,
        )
        logits = self.lm_head(_slice_logits(outputs.last_hidden_state, logits_to_keep))
        if step is not None:
            logits = step.merge(logits)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _records_every_token(self, kwargs: dict[str, Any]) -> bool:
        flags = ("output_hidden_states", "output_attentions")
        return any(kwargs.get(flag) or getattr(self.config, flag, False) for flag in flags)

    @classmethod
    def teacher_modules(cls, config: Any) -> list[str]:
        """Names of the modules of layers >= l that only the teacher runs."""
        modules = cls.decoder_class.layer_class.attention_class.teacher_modules(config)
        layers = range(config.num_key_value_layers, config.num_hidden_layers)
        return [f"model.layers.{i}.self_attn.{module}" for i in layers for module in modules]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load as in transformers, in student mode unless `swiftkv=False` is an argument. Weights are read once names
        and shapes of all tensors are right; an export without the teacher's projections is recognised by their absence.

        Of an adapter its base is read too, which `base_model=` (a directory or hub id) may name instead of the adapter.

        Raises:
            ModelError: naming the tensors that are missing, not expected or of another shape; teacher mode of an export
                without the teacher's projections; an adapter whose base is not there or another model.
        """
        source, config = pretrained_model_name_or_path, kwargs.pop("config", None)
        if config is None or isinstance(config, str | Path):
            config = read_config(config or source, config_class=cls.config_class, **hub_arguments(kwargs))
        # Of config.json `swiftkv` reads as True; the Auto classes set it from an argument after that.
        enabled: bool = kwargs.pop("swiftkv", config.swiftkv)
        config.swiftkv = True
        check_whole(config, source)
        with readable(source, kwargs) as (directory, checkpoint):
            if checkpoint is not None:
                config.swiftkv_teacher_weights = cls._has_teacher(config, checkpoint)
            _check_mode(config, enabled)
            family: Any = super()
            loaded = load_checked(family.from_pretrained, cls, config, directory, checkpoint, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if directory != source:
            model.config.name_or_path = model.name_or_path = str(source)
        model.swiftkv(enabled)
        return loaded

    @classmethod
    def without_weights(
        cls, directory: str | Path, *, config: Any, dtype: torch.dtype | str = "auto"
    ) -> tuple[Any, StoredWeights]:
        """The model that `from_pretrained` would load of a directory that is no adapter, on the meta device, and where
        its weights are read. Names and shapes of all tensors are checked first. Raises `ModelError`: as
        `from_pretrained`."""
        config = copy.deepcopy(config)
        config.swiftkv = True
        check_whole(config, directory)
        checkpoint = Checkpoint.open(directory)
        config.swiftkv_teacher_weights = cls._has_teacher(config, checkpoint)
        return open_checked(cls, config, checkpoint, dtype=dtype)

    @classmethod
    def _has_teacher(cls, config: Any, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has what only the teacher runs, which an export may lack."""
        teacher = cls.teacher_modules(config)
        stored = {name.rpartition(".")[0] for name in checkpoint.shards}
        return not teacher or not stored.isdisjoint(teacher)


def _check_mode(config: Any, enabled: bool) -> None:
    if not enabled and not config.swiftkv_teacher_weights:
        raise ModelError(
            "teacher mode needs the teacher's projections, which this checkpoint was exported without",
            field="swiftkv",
            value=False,
        )


def _first_deep(
    prompt_length: int | torch.Tensor | None,
    labels: torch.Tensor | None,
    logits_to_keep: int | torch.Tensor,
    num_tokens: int,
    num_seen: int,
) -> int | torch.Tensor:
    """The first deep one of `num_tokens` tokens behind `num_seen`, or that of each row, [batch]."""
    if isinstance(prompt_length, torch.Tensor):
        return (prompt_length - 1 - num_seen).clamp(0, num_tokens)
    if prompt_length is not None:
        return min(max(prompt_length - 1 - num_seen, 0), num_tokens)
    if labels is not None:
        counts = (labels != _NOT_COUNTED).long()
        first = torch.where(counts.any(-1), counts.argmax(-1), num_tokens)
        return (first - 1).clamp(0)
    if isinstance(logits_to_keep, int):
        return num_tokens - min(max(logits_to_keep, 1), num_tokens)
    return num_tokens - 1 if logits_to_keep.numel() else num_tokens


def _slice_logits(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    # Beside vLLM an older transformers may be installed, which has no such function and knows no 2D tensors.
    if not hasattr(modeling_utils, "slice_logits_to_keep"):
        return hidden_states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
    return modeling_utils.slice_logits_to_keep(hidden_states, logits_to_keep)


def _select_logits(
    logits_to_keep: int | torch.Tensor, num_tokens: int
) -> tuple[TokenSelection | None, int | torch.Tensor]:
    """The tokens that `logits_to_keep` names, and what it names among them (0: all), as transformers spells both."""
    if isinstance(logits_to_keep, int):
        return (TokenSelection(logits_to_keep) if 0 < logits_to_keep < num_tokens else None), 0
    named = logits_to_keep
    if named.dtype == torch.bool:  # [num_tokens], or [batch, num_tokens] with a count of its own in each row
        positions = (named if named.ndim == 1 else named.any(0)).nonzero().squeeze(1)
        return TokenSelection(positions), 0 if named.ndim == 1 else named[:, positions]
    if named.ndim == 1:
        return TokenSelection(torch.where(named < 0, named + num_tokens, named)), 0
    positions, inverse = named.unique(return_inverse=True)  # [batch, num_positions]
    return TokenSelection(positions), inverse
