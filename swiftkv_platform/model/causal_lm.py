"""The language model around a SwiftKV decoder: heads, modes, loading and export. It knows no particular family."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.cache import make_cache
from swiftkv_platform.model.checkpoint import tensor_names
from swiftkv_platform.model.decoder import SwiftKVDecoderMixin


class SwiftKVForCausalLMMixin(nn.Module):
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
        self.post_init()

    def swiftkv(self, enabled: bool = True) -> Self:
        """Student mode (True, the default after loading) or teacher mode (False): one set of weights serves both."""
        if not enabled and not self.config.swiftkv_teacher_weights:
            raise ModelError(
                "teacher mode needs the teacher's projections, which this checkpoint was exported without",
                field="swiftkv",
                value=False,
            )
        self.model.swiftkv_enabled = enabled
        return self

    def swiftkv_parameters(self) -> dict[str, nn.Parameter]:
        """What distillation trains by default, by name: q, k, v projections and norm of SwiftKV, and the exit head."""
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [batch, num_kept, vocab_size] of the positions `logits_to_keep` names (0: all), as in transformers.

        In student mode only the tokens from the first such position on run through layers >= l. Labels, hidden states
        and attentions concern all tokens, so with them every token does.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        num_tokens = 0 if tokens is None else tokens.shape[1]
        num_kept = num_tokens
        if labels is None and not self._records_every_token(kwargs):
            num_kept = _suffix_length(logits_to_keep, num_tokens)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_kept=num_kept,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.ndim == 1:
            logits_to_keep = logits_to_keep % num_tokens - (num_tokens - hidden.shape[1])
        logits = self.lm_head(slice_logits_to_keep(hidden, logits_to_keep))
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

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`generate()` gets a cache of `num_kv_cache_layers` layers where it would make one of L."""
        dynamic = generation_config.cache_implementation in (None, "dynamic")
        if dynamic and generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = make_cache(self.config, swiftkv=self.model.swiftkv_enabled)
            return None
        family: Any = super()
        return family._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, in student mode. A checkpoint that lacks tensors is refused before weights are read.

        Raises:
            ModelError: naming the missing tensor.
        """
        config = kwargs.pop("config", None)
        if config is None or isinstance(config, str | Path):
            config = cls.config_class.from_pretrained(config or pretrained_model_name_or_path)
        names = tensor_names(pretrained_model_name_or_path, **kwargs)
        if names is not None:
            _check_tensors(config, names, str(pretrained_model_name_or_path))
        family: Any = super()
        return family.from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)


def _suffix_length(logits_to_keep: int | torch.Tensor, num_tokens: int) -> int:
    """How many tokens, counted from the end, hold every position that `logits_to_keep` names."""
    if isinstance(logits_to_keep, int):
        return min(logits_to_keep, num_tokens) if logits_to_keep > 0 else num_tokens
    if logits_to_keep.ndim != 1 or logits_to_keep.numel() == 0 or logits_to_keep.dtype == torch.bool:
        return num_tokens
    return num_tokens - int((logits_to_keep % num_tokens).min())


def _check_tensors(config: Any, names: frozenset[str], where: str) -> None:
    """Compare a checkpoint's tensor names with what its configuration promises; note a dropped teacher in `config`."""
    first, last = config.num_key_value_layers, config.num_hidden_layers
    if first == last:
        return
    teacher = [f"model.layers.{i}.self_attn.k_proj.weight" in names for i in range(first, last)]
    config.swiftkv_teacher_weights = all(teacher)
    required = ["model.norm_swiftkv.weight"]
    required += [f"model.layers.{i}.self_attn.q_proj_swiftkv.weight" for i in range(first, last)]
    for i in config.layer_map.leaders:
        required += [f"model.layers.{i}.self_attn.{kind}_proj_swiftkv.weight" for kind in "kv"]
    if config.early_exit:
        required += ["exit_norm.weight", "exit_head.weight"]
    missing = [name for name in required if name not in names]
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} tensors that its config.json promises (num_key_value_layers={first}, "
            f"key_value_group_size={config.key_value_group_size}): {missing[0]}, ...",
            field="model.name_or_path",
            value=where,
        )
