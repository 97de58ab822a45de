"""The forward pass of a SwiftKV decoder, the only one: training, `generate()` and the engine all come through here.

    layers < l  ->  x  ->  norm_swiftkv  ->  K, V of every layer >= l      (all tokens)
                    x  ->  token selection  ->  layers >= l  ->  norm       (tokens whose logits are needed)

A prompt token whose logits nobody asks for never enters the upper layers: its K and V for all of them are already known
after layer l - 1 (paper, section 3.1). It knows no loss, sampler or scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.attention import KeyValue, Rotation
from swiftkv_platform.model.cache import make_cache
from swiftkv_platform.model.masks import Masks, make_masks, select_rows
from swiftkv_platform.planning import LayerMap


@dataclass(frozen=True)
class DecoderContext:
    """What every layer needs to know about the tokens of one forward pass."""

    hidden: torch.Tensor
    """Embeddings, [batch, num_tokens, hidden_size]."""
    position_ids: torch.Tensor
    """[batch or 1, num_tokens]."""
    rotation: Rotation
    masks: Masks
    """By layer."""
    past_key_values: DynamicCache | None
    layer_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[1]

    def select(self, num_kept: int) -> DecoderContext:
        """The context of the last `num_kept` tokens: new metadata for the upper layers, this one unchanged."""
        if num_kept == self.num_tokens:
            return self
        cos, sin = self.rotation
        return DecoderContext(
            hidden=self.hidden[:, -num_kept:],
            position_ids=self.position_ids[:, -num_kept:],
            rotation=(cos[:, -num_kept:], sin[:, -num_kept:]),
            masks=select_rows(self.masks, self.num_tokens, num_kept, self.hidden.device),
            past_key_values=self.past_key_values,
            layer_arguments=self.layer_arguments,
        )


class SwiftKVDecoderLayerMixin(nn.Module):
    """Mixed into a family's decoder layer for layers >= l."""

    attention_class: ClassVar[type[nn.Module]]
    self_attn: Any

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = self.attention_class(config, layer_idx)

    def project_shared_key_value(self, hidden: torch.Tensor, rotation: Rotation) -> KeyValue:
        """K and V of this leader's group from norm_swiftkv(x) [batch, num_tokens, hidden_size]."""
        attention = self.self_attn
        key_value: KeyValue = attention.shape_key_value(
            attention.k_proj_swiftkv(hidden), attention.v_proj_swiftkv(hidden), rotation
        )
        return key_value


class SwiftKVDecoderMixin(nn.Module):
    """Mixed into a family's decoder (`model.model`)."""

    layer_class: ClassVar[type[nn.Module]]
    # What the family's own decoder brings.
    config: Any
    embed_tokens: nn.Module
    layers: Any
    norm: Any
    rotary_emb: nn.Module
    post_init: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i in range(config.num_key_value_layers, config.num_hidden_layers):
            self.layers[i] = self.layer_class(config, i)
        self.norm_swiftkv = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)
        self.swiftkv_enabled = True
        self._fused_key_value: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.post_init()

    @property
    def layer_map(self) -> LayerMap:
        layer_map: LayerMap = self.config.layer_map
        return layer_map

    def begin(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        **layer_arguments: Any,
    ) -> DecoderContext:
        """Embed `input_ids` [batch, num_tokens] and build what every layer shares.

        Without `attention_mask` and cache, positions that restart keep packed samples apart.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ModelError("give input_ids or inputs_embeds, one of them", field="input_ids")
        hidden: torch.Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + hidden.shape[1], device=hidden.device).unsqueeze(0)
        masks = make_masks(
            self.config,
            [self.layer_map.cache_layer(i) if self.swiftkv_enabled else i for i in range(len(self.layers))],
            hidden=hidden,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        return DecoderContext(
            hidden=hidden,
            position_ids=position_ids,
            rotation=self.rotary_emb(hidden, position_ids=position_ids),
            masks=masks,
            past_key_values=past_key_values,
            layer_arguments=layer_arguments,
        )

    def _run(self, i: int, hidden: torch.Tensor, context: DecoderContext, **arguments: Any) -> torch.Tensor:
        output: torch.Tensor = self.layers[i](
            hidden,
            attention_mask=context.masks[i],
            position_ids=context.position_ids,
            position_embeddings=context.rotation,
            past_key_values=context.past_key_values,
            use_cache=context.past_key_values is not None,
            **context.layer_arguments,
            **arguments,
        )
        return output

    def lower(self, context: DecoderContext) -> torch.Tensor:
        """x, the hidden state after layer l - 1: [batch, num_tokens, hidden_size]. The same in both modes."""
        hidden = context.hidden
        for i in range(self.layer_map.num_key_value_layers):
            hidden = self._run(i, hidden, context)
        return hidden

    def teacher_upper(
        self, x: torch.Tensor, context: DecoderContext, *, record: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Layers >= l as pretrained: final normalised hidden state [batch, num_tokens, hidden_size].

        `record` receives the output of each upper layer, before the final norm.
        """
        if not self.config.swiftkv_teacher_weights:
            raise ModelError(
                "this checkpoint was exported without the teacher's projections; load one that has them",
                field="swiftkv",
                value=False,
            )
        hidden = x
        for i in range(self.layer_map.num_key_value_layers, len(self.layers)):
            hidden = self._run(i, hidden, context)
            if record is not None:
                record.append(hidden)
        return self.normalise(hidden)

    def student_upper(
        self,
        x: torch.Tensor,
        context: DecoderContext,
        *,
        num_kept: int | None = None,
        record: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Layers >= l over shared K and V: final normalised hidden state [batch, num_kept, hidden_size].

        Args:
            num_kept: the last tokens whose hidden states are needed; None: all.
            record: receives the output of each upper layer, before the final norm.
        """
        shared = self.shared_key_values(x, context)
        num_kept = context.num_tokens if num_kept is None else num_kept
        hidden, context = x[:, -num_kept:], context.select(num_kept)
        first = self.layer_map.num_key_value_layers
        for i in range(first, len(self.layers)):
            key_value = shared[self.layer_map.cache_layer(i) - first]
            hidden = self._run(i, hidden, context, shared_key_value=key_value)
            if record is not None:
                record.append(hidden)
        return self.normalise(hidden)

    def normalise(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        normalised: torch.Tensor = self.norm(hidden)
        return normalised

    def shared_key_values(self, x: torch.Tensor, context: DecoderContext) -> list[KeyValue]:
        """K and V of every group over the whole context; with a cache, appended to it: one entry a group."""
        layer_map, hidden = self.layer_map, self.norm_swiftkv(x)
        leaders: list[Any] = [self.layers[i] for i in layer_map.leaders]
        if self._fused_key_value is None:
            shared = [layer.project_shared_key_value(hidden, context.rotation) for layer in leaders]
        else:
            parts = F.linear(hidden, *self._fused_key_value).chunk(2 * len(leaders), dim=-1)
            shared = [
                layer.self_attn.shape_key_value(parts[2 * i], parts[2 * i + 1], context.rotation)
                for i, layer in enumerate(leaders)
            ]
        if context.past_key_values is None:
            return shared
        first = layer_map.num_key_value_layers
        return [context.past_key_values.update(*kv, first + group) for group, kv in enumerate(shared)]

    def fuse_shared_key_value(self) -> None:
        """For inference: one GEMM for K and V of all groups; the projections' parameters become views of its weight."""
        projections = [
            projection
            for i in self.layer_map.leaders
            for projection in (self.layers[i].self_attn.k_proj_swiftkv, self.layers[i].self_attn.v_proj_swiftkv)
        ]
        if not projections:
            return
        weight = torch.cat([p.weight.detach() for p in projections])
        bias = None if projections[0].bias is None else torch.cat([p.bias.detach() for p in projections])
        rows = projections[0].out_features
        for n, projection in enumerate(projections):
            projection.weight = nn.Parameter(weight[n * rows : (n + 1) * rows], requires_grad=False)
            if bias is not None:
                projection.bias = nn.Parameter(bias[n * rows : (n + 1) * rows], requires_grad=False)
        self._fused_key_value = (weight, bias)

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_kept: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Final hidden states of the last `num_kept` tokens (None: all), [batch, num_kept, hidden_size]."""
        if use_cache and past_key_values is None:
            past_key_values = make_cache(self.config, swiftkv=self.swiftkv_enabled)
        context = self.begin(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        x = self.lower(context)
        if self.swiftkv_enabled:
            hidden = self.student_upper(x, context, num_kept=num_kept)
        else:
            hidden = self.teacher_upper(x, context)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)
