"""The forward pass of a SwiftKV decoder, which training, `generate()` and the engine share.

    layers < l  ->  x  ->  norm_swiftkv  ->  K, V of every layer >= l      (all tokens)
                    x  ->  token selection  ->  layers >= l  ->  norm       (tokens whose logits are needed)

Prompt tokens whose logits are not needed never enter layers >= l: their K and V in these layers come from x (paper,
section 3.1). In a student with `prefill_layers`, these tokens also bypass the other layers below l, which compute only
their K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.attention import KeyValue, Rotation, SwiftKVAttentionMixin, normalize_attention_input
from swiftkv_platform.model.cache import (
    CacheContents,
    append_key_value,
    check_cache_layers,
    make_cache,
    read_key_value,
    select_rows,
)
from swiftkv_platform.model.context import DecoderContext, Masks, TokenSelection, make_masks
from swiftkv_platform.model.deep_tokens import Bypass, DeepGroup, DeepSuffixWriter, DeepWriter, run_bypassed_layer
from swiftkv_platform.student_shape import LayerMap

LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")
"""RoPE types whose factors depend on the sequence length."""


class LayerRotaryEmbeddings:
    """RoPE factors per layer of a model. Full and sliding layers may have different RoPEs."""

    def __init__(self, config: Any) -> None:
        self._layer_types: list[str] = config.layer_types if config.family.has_rope_per_layer_type else []
        self._types = sorted(set(self._layer_types))

    def make(self, rotary_emb: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Return the rotation for all layers: the outputs of `rotary_emb` for each layer type, concatenated."""
        if not self._types:
            one: Rotation = rotary_emb(hidden, position_ids=position_ids)
            return one
        return tuple(part for kind in self._types for part in rotary_emb(hidden, position_ids, kind))

    def select(self, i: int, rotation: Rotation) -> Rotation:
        """Return layer i's part of a rotation from `make`."""
        if not self._types:
            return rotation
        first = 2 * self._types.index(self._layer_types[i])
        return rotation[first : first + 2]


def read_rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """Return a configuration's RoPE parameters by layer type; by None if all layers share them."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = {kind: values for kind, values in rope.items() if isinstance(values, dict)}
    return by_type or {None: rope}


class ScaledEmbedding(nn.Embedding):
    """Embedding whose output is multiplied by `scale`, which `rounds_scale` rounds to the weight's dtype."""

    def __init__(self, config: Any, scale: float, *, rounds_scale: bool) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self._scale, self._rounds_scale = scale, rounds_scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scale_embeddings(super().forward(input_ids))

    def scale_embeddings(self, embedded: torch.Tensor) -> torch.Tensor:
        """Multiply embeddings, such as rows of the weight, by `scale`."""
        return embedded * (torch.tensor(self._scale).to(embedded.dtype).item() if self._rounds_scale else self._scale)


class SwiftKVDecoderLayerMixin(nn.Module):
    """Mixin for a family's decoder layer, for layers >= l."""

    attention_class: ClassVar[type[SwiftKVAttentionMixin]]
    self_attn: Any

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = self.attention_class(config, layer_idx)


class SwiftKVDecoderMixin(nn.Module):
    """Mixin for a family's decoder (`model.model`)."""

    layer_class: ClassVar[type[SwiftKVDecoderLayerMixin]]
    # Attributes of the family's own decoder.
    config: Any
    embed_tokens: nn.Module
    layers: Any
    norm: Any
    rotary_emb: nn.Module
    post_init: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        scale = config.family.get_multiplier(config, "embedding_multiplier")
        if scale != 1.0:
            self.embed_tokens = ScaledEmbedding(config, scale, rounds_scale=config.family.multipliers == "sizes")
        self._logits_scaling = config.family.get_multiplier(config, "logits_scaling")
        for i in range(config.num_key_value_layers, config.num_hidden_layers):
            self.layers[i] = self.layer_class(config, i)
        self.layer_map: LayerMap = config.layer_map  # cached, since the property makes a new one per access
        if self.layer_map.leaders:  # dense models have no norm_swiftkv
            size, eps = config.hidden_size, config.rms_norm_eps
            self.norm_swiftkv = type(self.norm)(size, eps=eps) if config.family.has_input_norm else nn.Identity()
        self.layer_rotations = LayerRotaryEmbeddings(config)
        self.swiftkv_enabled = True
        self.run_teacher_lower: Callable[[DecoderContext], torch.Tensor] | None = None
        """Runs the teacher's layers < l if training changed the student's; None: both share them."""
        self.fused_layers: Callable[..., torch.Tensor | None] | None = None
        """Runs several layers in one operator, with the arguments of `run_layers`; set by the engine."""
        self.post_init()

    def make_context(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        masks: Masks | None = None,
        **layer_arguments: Any,
    ) -> DecoderContext:
        """Embed `input_ids` [batch, num_tokens] and make the context that all layers share.

        Without `attention_mask` and cache, packed samples begin where positions restart. If `masks` is None, masks are
        made from the other arguments.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ModelError("give either input_ids or inputs_embeds", field="input_ids")
        check_cache_layers(past_key_values, self.layer_map, swiftkv=self.swiftkv_enabled)
        hidden: torch.Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + hidden.shape[1], device=hidden.device).unsqueeze(0)
        if masks is None:
            masks = make_masks(
                self.config,
                [self.layer_map.get_cache_layer(i) if self.swiftkv_enabled else i for i in range(len(self.layers))],
                hidden=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        return DecoderContext(
            hidden=hidden,
            position_ids=position_ids,
            rotation=self.make_rotations(hidden, position_ids),
            masks=masks,
            past_key_values=past_key_values,
            layer_arguments=layer_arguments,
        )

    def make_rotations(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Return the rotation for all layers; `layer_rotations.select` returns a layer's part."""
        return self.layer_rotations.make(self.rotary_emb, hidden, position_ids)

    def run_layer(self, i: int, hidden: torch.Tensor, context: DecoderContext, **arguments: Any) -> torch.Tensor:
        """Run layer i over `hidden` [batch, num_tokens, hidden_size]: with `shared_key_value` the student's layer, else
        the teacher's."""
        output: torch.Tensor = self.layers[i](
            hidden,
            attention_mask=context.masks.by_layer[i],
            position_ids=context.position_ids,
            position_embeddings=self.select_rotation(i, context, shared="shared_key_value" in arguments),
            past_key_values=context.past_key_values,
            use_cache=context.past_key_values is not None,
            **context.layer_arguments,
            **arguments,
        )
        return output

    def select_rotation(self, i: int, context: DecoderContext, *, shared: bool) -> Rotation:
        """Return layer i's rotation. With `shared` keys, queries are rotated as in the group's first layer."""
        return self.layer_rotations.select(self.layer_map.get_leader(i) if shared else i, context.rotation)

    def run_layers(
        self,
        layers: range,
        hidden: torch.Tensor,
        context: DecoderContext,
        shared: Iterable[KeyValue | DeepGroup] | None = None,
        *,
        record: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run consecutive layers over `hidden` [batch, num_tokens, hidden_size].

        Args:
            shared: K and V for each layer's `shared_key_value` argument, computed when the layer runs if `shared` is a
                generator; None: the layers compute their own, as in the teacher.
            record: list to which the output of each layer is appended.
        """
        if self.fused_layers is not None and record is None:
            shared = None if shared is None else list(shared)
            if (output := self.fused_layers(self, layers, hidden, context, shared)) is not None:
                return output
        key_values = None if shared is None else iter(shared)
        for i in layers:
            arguments = {} if key_values is None else {"shared_key_value": next(key_values)}
            hidden = self.run_layer(i, hidden, context, **arguments)
            if record is not None:
                record.append(hidden)
        return hidden

    def run_lower_layers(self, context: DecoderContext, bypass: Bypass | None = None) -> torch.Tensor:
        """Run layers < l. Returns x, the hidden state after layer l - 1: [batch, num_tokens, hidden_size].

        `bypass` runs the layers that skipped tokens bypass. None runs all tokens through all layers, as in the teacher.
        """
        layers = range(self.layer_map.num_key_value_layers)
        if bypass is None:
            return self.run_layers(layers, context.hidden, context)
        hidden = context.hidden
        for i in layers:
            if i in self.layer_map.bypassed_layers:
                hidden = bypass(self, i, hidden, context)
            else:
                hidden = self.run_layer(i, hidden, context)
        return hidden

    def write_key_values(self, i: int, hidden: torch.Tensor, context: DecoderContext) -> None:
        """Write K and V of layer i to the cache without attending. The `layer_arguments` of `context` must tell the
        attention function so."""
        layer = self.layers[i]
        layer.self_attn(
            normalize_attention_input(layer, hidden),
            attention_mask=None,
            position_ids=context.position_ids,
            position_embeddings=self.layer_rotations.select(i, context.rotation),
            past_key_values=context.past_key_values,
            **context.layer_arguments,
        )

    def run_teacher_upper(
        self, x: torch.Tensor, context: DecoderContext, *, record: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run the teacher's layers >= l. Returns the hidden state after the final norm, [batch, num_tokens,
        hidden_size].

        `record` receives the output of each of these layers.
        """
        if not self.config.swiftkv_teacher_weights:
            raise ModelError(
                "this checkpoint has no teacher projections; load a checkpoint that was exported with its teacher",
                field="swiftkv",
                value=False,
            )
        upper = range(self.layer_map.num_key_value_layers, len(self.layers))
        return self.apply_final_norm(self.run_layers(upper, x, context, record=record))

    def run_student_upper(
        self,
        x: torch.Tensor,
        context: DecoderContext,
        *,
        selection: TokenSelection | None = None,
        shared: Sequence[CacheContents] | None = None,
        deep: DeepWriter | None = None,
        hidden: torch.Tensor | None = None,
        record: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the student's layers >= l over shared K and V. Returns the hidden state after the final norm, [num_rows,
        num_selected, hidden_size].

        Args:
            selection: tokens whose hidden states are returned; None: all.
            shared: result of `compute_shared_key_values(x, context)`; None computes it.
            deep: writer of the deep tokens' K and V, which replaces `shared` for students with `deep_leaders`.
            hidden: input of the selected tokens, [num_rows, num_selected, hidden_size]; None: x.
            record: list that receives the output of each of these layers.
        """
        assert (deep is not None) == bool(self.layer_map.deep_leaders), "students with deep_leaders need a DeepWriter"
        if shared is None:
            shared = self.compute_shared_key_values(x, context) if deep is None else ()
        if selection is not None:
            hidden, context = selection.select(x) if hidden is None else hidden, context.select(selection)
        hidden = x if hidden is None else hidden
        if hidden.numel():
            upper = range(self.layer_map.num_key_value_layers, len(self.layers))
            by_layer = self._iterate_key_values(upper, shared, selection, deep)
            hidden = self.run_layers(upper, hidden, context, by_layer, record=record)
        elif deep is not None:
            for group in range(len(self.layer_map.leaders)):
                deep.write_shared(group)
        return self.apply_final_norm(hidden)

    def _iterate_key_values(
        self, layers: range, shared: Sequence[CacheContents], selection: TokenSelection | None, deep: DeepWriter | None
    ) -> Iterator[KeyValue | DeepGroup]:
        """Yield the keys and values of each layer >= l, which are those of its group."""
        leaders, modules = self.layer_map.leaders, list(self.layers)  # indexing a `ModuleList` is slow
        for i in layers:
            if i in leaders:
                group, leader = leaders.index(i), modules[i].self_attn
                if deep is None:
                    stored = shared[group] if selection is None else select_rows(shared[group], selection)
                    key_value = leader.expand_key_value(read_key_value(stored))
                else:
                    key_value = DeepGroup(group, leader, deep, selection)
            yield key_value

    def apply_final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and the family's logits scaling, so that all heads share the scaling."""
        normalized: torch.Tensor = self.norm(hidden)
        return normalized if self._logits_scaling == 1.0 else normalized / self._logits_scaling

    @property
    def _leaders(self) -> list[SwiftKVAttentionMixin]:
        """Attention modules of the groups' first layers, which own the groups' projections."""
        return [self.layers[i].self_attn for i in self.layer_map.leaders]

    def list_shared_projections(self) -> list[nn.Module]:
        """Return the modules that only shared K and V pass through; deep tokens with their own K and V use none."""
        return [self.norm_swiftkv, *(module for leader in self._leaders for module in leader.input_projections)]

    def compute_shared_key_values(self, x: torch.Tensor, context: DecoderContext) -> Sequence[CacheContents]:
        """Return K and V of each group over the whole context. With a cache, append the new tokens' K and V first."""
        shared = self.project_key_values(x, context.rotation)
        if context.past_key_values is None:
            return shared
        first = self.layer_map.num_key_value_layers
        return [append_key_value(context.past_key_values, *kv, first + group) for group, kv in enumerate(shared)]

    def project_key_values(self, x: torch.Tensor, rotation: Rotation) -> list[KeyValue]:
        """Return K and V of every group from x [batch, num_tokens, hidden_size], as its cache layer stores them.
        `rotation` is the result of `make_rotations`."""
        leaders = self._leaders
        if not leaders:
            return []
        rotations = [self.layer_rotations.select(i, rotation) for i in self.layer_map.leaders]
        # A trained norm is float32. Cast once here; under autocast each projection would cast and keep its own copy.
        hidden = self.norm_swiftkv(x).to(x.dtype)
        # Group by group, so that FSDP gathers each group's shards once.
        return [
            leader.make_cache_entry([projection(hidden) for projection in leader.input_projections], group_rotation)
            for leader, group_rotation in zip(leaders, rotations, strict=True)
        ]

    def make_deep_suffix(
        self,
        x: torch.Tensor,
        context: DecoderContext,
        first: int | torch.Tensor,
        selection: TokenSelection | None = None,
    ) -> DeepSuffixWriter:
        """Make the `DeepWriter` of a pass whose rows end with their deep tokens.

        Args:
            first: index of the first deep token, for all rows or per row, int64 [batch].
            selection: selection passed to `run_student_upper`; it includes the deep tokens.
        """
        all_deep = isinstance(first, int) and first == 0 and selection is None
        shared = [] if all_deep else self.project_key_values(x, context.rotation)
        return DeepSuffixWriter(
            shared, first, context.num_tokens, selection, context.past_key_values, self.layer_map.num_key_value_layers
        )

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        selection: TokenSelection | Callable[[torch.Tensor], TokenSelection] | None = None,
        first_deep: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the final hidden states of the selected tokens, [num_rows, num_selected, hidden_size].

        Args:
            selection: selected tokens, or a function that selects them from x; None: all.
            first_deep: index of the first deep token, for all rows or per row, int64 [batch]; None: the last token.
                Only for students with `deep_leaders`.
        """
        if use_cache and past_key_values is None:
            past_key_values = make_cache(self.config, swiftkv=self.swiftkv_enabled)
        context = self.make_context(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        first_deep = context.num_tokens - 1 if first_deep is None else first_deep
        if self.swiftkv_enabled:
            x = self.run_lower_layers(context, partial(run_bypassed_layer, first_deep))
        else:
            x = (self.run_teacher_lower or self.run_lower_layers)(context)
        selection = selection(x) if callable(selection) else selection
        if self.swiftkv_enabled and self.layer_map.deep_leaders:
            hidden = self._run_upper_with_deep_tokens(x, context, selection, first_deep)
        elif self.swiftkv_enabled:
            hidden = self.run_student_upper(x, context, selection=selection)
        else:
            hidden = self.run_teacher_upper(x, context)
            hidden = hidden if selection is None else selection.select(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

    def _run_upper_with_deep_tokens(
        self, x: torch.Tensor, context: DecoderContext, selection: TokenSelection | None, first: int | torch.Tensor
    ) -> torch.Tensor:
        """Call `run_student_upper` on rows that end with deep tokens. All deep tokens run, selected or not."""
        num_tokens = context.num_tokens
        run, num_deep = selection, num_tokens - (first if isinstance(first, int) else int(first.min()))
        if selection is not None and selection.rows is None:
            if isinstance(selection.tokens, int):
                run = TokenSelection(max(selection.tokens, num_deep))
            elif selection.tokens is not None and not selection.tokens.numel():
                run = TokenSelection(num_deep)
            elif num_deep:
                run = None
        if run is not None and run.count_selected(num_tokens) == num_tokens and run.rows is None:
            run = None
        hidden = self.run_student_upper(x, context, selection=run, deep=self.make_deep_suffix(x, context, first, run))
        if selection is None or run is selection:
            return hidden
        if isinstance(selection.tokens, int):
            return hidden[:, hidden.shape[1] - selection.tokens :]
        return selection.select(hidden)
