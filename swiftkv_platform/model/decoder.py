"""The forward pass of a SwiftKV decoder, the only one: training, `generate()` and the engine all use it.

    layers < l  ->  x  ->  norm_swiftkv  ->  K, V of every layer >= l      (all tokens)
                    x  ->  token selection  ->  layers >= l  ->  norm       (tokens whose logits are needed)

A prompt token whose logits are not needed never enters the upper layers: its K and V for all of them are already known
after layer l - 1 (paper, section 3.1). If a student lists the layers that prompts run through, such a token bypasses
the other layers below l as well, and only its K and V are computed there.
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
from swiftkv_platform.model.cache import Stored, append, check_cache, make_cache, read, take_rows
from swiftkv_platform.model.context import DecoderContext, Masks, TokenSelection, make_masks
from swiftkv_platform.model.deep_tokens import Bypass, DeepGroup, DeepSuffix, DeepWriter, bypass_before
from swiftkv_platform.student_shape import LayerMap

LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Kinds of RoPE whose factors depend on the length of the sequence."""


class LayerRotations:
    """Rotations by layer of a model, whose layer types may each have their own RoPE."""

    def __init__(self, config: Any) -> None:
        self._layer_types: list[str] = config.layer_types if config.family.rotates_by_layer_type else []
        self._types = sorted(set(self._layer_types))

    def make(self, rotary_emb: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Make the tokens' rotation for all layers: the outputs of `rotary_emb` for each layer type, concatenated."""
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


def rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """Return RoPE's parameters in a transformers configuration by layer type; under None if all layers share them."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = {kind: values for kind, values in rope.items() if isinstance(values, dict)}
    return by_type or {None: rope}


class ScaledEmbedding(nn.Embedding):
    """Embedding whose output is multiplied by `scale`. `rounds`: round the factor to the weight's dtype."""

    def __init__(self, config: Any, scale: float, *, rounds: bool) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self._scale, self._rounds = scale, rounds

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(input_ids))

    def scaled(self, embedded: torch.Tensor) -> torch.Tensor:
        """Multiply embeddings read from the weight by the factor."""
        return embedded * (torch.tensor(self._scale).to(embedded.dtype).item() if self._rounds else self._scale)


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
        scale = config.family.multiplier(config, "embedding_multiplier")
        if scale != 1.0:
            self.embed_tokens = ScaledEmbedding(config, scale, rounds=config.family.multipliers == "sizes")
        self._logits_scaling = config.family.multiplier(config, "logits_scaling")
        for i in range(config.num_key_value_layers, config.num_hidden_layers):
            self.layers[i] = self.layer_class(config, i)
        self.layer_map: LayerMap = config.layer_map  # cached: making one costs as much as a small kernel
        if self.layer_map.leaders:  # a dense model has no layer that would read it
            normalises = config.family.normalises_inputs
            size, eps = config.hidden_size, config.rms_norm_eps
            self.norm_swiftkv = type(self.norm)(size, eps=eps) if normalises else nn.Identity()
        self.layer_rotations = LayerRotations(config)
        self.swiftkv_enabled = True
        self.teacher_lower: Callable[[DecoderContext], torch.Tensor] | None = None
        """Teacher's layers < l, if the student has trained its own and both are compared; None: they are the same."""
        self.together: Callable[..., torch.Tensor | None] | None = None
        """An engine's way to run several layers at once, with the arguments of `run_layers`; None: one by one."""
        self.post_init()

    def begin(
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
        """Embed `input_ids` [batch, num_tokens] and build the context that all layers share.

        Without `attention_mask` and cache, positions that restart separate packed samples. `masks`: None makes them.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ModelError("give either input_ids or inputs_embeds", field="input_ids")
        check_cache(past_key_values, self.layer_map, swiftkv=self.swiftkv_enabled)
        hidden: torch.Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + hidden.shape[1], device=hidden.device).unsqueeze(0)
        if masks is None:
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
            rotation=self.rotations(hidden, position_ids),
            masks=masks,
            past_key_values=past_key_values,
            layer_arguments=layer_arguments,
        )

    def rotations(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Return the tokens' rotation for all layers; `layer_rotations.select` returns a layer's part."""
        return self.layer_rotations.make(self.rotary_emb, hidden, position_ids)

    def run_layer(self, i: int, hidden: torch.Tensor, context: DecoderContext, **arguments: Any) -> torch.Tensor:
        """Run layer i over `hidden` [batch, num_tokens, hidden_size]; without a `shared_key_value`, the teacher's."""
        output: torch.Tensor = self.layers[i](
            hidden,
            attention_mask=context.masks.by_layer[i],
            position_ids=context.position_ids,
            position_embeddings=self.rotation_of(i, context, shared="shared_key_value" in arguments),
            past_key_values=context.past_key_values,
            use_cache=context.past_key_values is not None,
            **context.layer_arguments,
            **arguments,
        )
        return output

    def rotation_of(self, i: int, context: DecoderContext, *, shared: bool) -> Rotation:
        """Return layer i's rotation. A group shares its keys, so its queries are rotated as its first layer's."""
        return self.layer_rotations.select(self.layer_map.leader(i) if shared else i, context.rotation)

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
            shared: each layer's `shared_key_value`, which may be made as it is asked for; None: they have none.
            record: receives the output of each layer.
        """
        if self.together is not None and record is None:
            shared = None if shared is None else list(shared)
            if (output := self.together(self, layers, hidden, context, shared)) is not None:
                return output
        each = None if shared is None else iter(shared)
        for i in layers:
            given = {} if each is None else {"shared_key_value": next(each)}
            hidden = self.run_layer(i, hidden, context, **given)
            if record is not None:
                record.append(hidden)
        return hidden

    def lower(self, context: DecoderContext, bypass: Bypass | None = None) -> torch.Tensor:
        """Return x, the hidden state after layer l - 1: [batch, num_tokens, hidden_size].

        `bypass` runs the layers that skipped tokens bypass, if the student has such; None: all tokens run through every
        layer, as in the teacher.
        """
        layers = range(self.layer_map.num_key_value_layers)
        if bypass is None:
            return self.run_layers(layers, context.hidden, context)
        hidden = context.hidden
        for i in layers:
            if i in self.layer_map.gaps:
                hidden = bypass(self, i, hidden, context)
            else:
                hidden = self.run_layer(i, hidden, context)
        return hidden

    def write_key_values(self, i: int, hidden: torch.Tensor, context: DecoderContext) -> None:
        """Write K and V of layer i to the cache, computing only its attention's projections. `context`: its
        `layer_arguments` tell the attention function not to attend."""
        layer = self.layers[i]
        layer.self_attn(
            normalize_attention_input(layer, hidden),
            attention_mask=None,
            position_ids=context.position_ids,
            position_embeddings=self.layer_rotations.select(i, context.rotation),
            past_key_values=context.past_key_values,
            **context.layer_arguments,
        )

    def teacher_upper(
        self, x: torch.Tensor, context: DecoderContext, *, record: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run layers >= l as pretrained; returns the final normalised hidden state [batch, num_tokens, hidden_size].

        `record` receives the output of each upper layer, before the final norm.
        """
        if not self.config.swiftkv_teacher_weights:
            raise ModelError(
                "this checkpoint was exported without the teacher's projections; load one that has them",
                field="swiftkv",
                value=False,
            )
        upper = range(self.layer_map.num_key_value_layers, len(self.layers))
        return self.normalise(self.run_layers(upper, x, context, record=record))

    def student_upper(
        self,
        x: torch.Tensor,
        context: DecoderContext,
        *,
        kept: TokenSelection | None = None,
        shared: Sequence[Stored] | None = None,
        deep: DeepWriter | None = None,
        hidden: torch.Tensor | None = None,
        record: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run layers >= l over shared K and V; returns the final normalised hidden state [num_rows, num_kept,
        hidden_size].

        Args:
            kept: the tokens whose hidden states are needed; None: all.
            shared: result of `shared_key_values(x, context)`; None computes it.
            deep: writer that takes the K and V of deep tokens and returns those of groups, instead of `shared`; for a
                student with `deep_leaders`, and only for one.
            hidden: input of the kept tokens, [num_rows, num_kept, hidden_size]; None: x.
            record: receives the output of each upper layer, before the final norm.
        """
        assert (deep is not None) == bool(self.layer_map.deep_leaders), "a form of its own says which tokens are deep"
        if shared is None:
            shared = self.shared_key_values(x, context) if deep is None else ()
        if kept is not None:
            hidden, context = kept.take(x) if hidden is None else hidden, context.select(kept)
        hidden = x if hidden is None else hidden
        if hidden.numel():
            upper = range(self.layer_map.num_key_value_layers, len(self.layers))
            by_layer = self._of_groups(upper, shared, kept, deep)
            hidden = self.run_layers(upper, hidden, context, by_layer, record=record)
        elif deep is not None:
            for group in range(len(self.layer_map.leaders)):
                deep.write_shared(group)
        return self.normalise(hidden)

    def _of_groups(
        self, layers: range, shared: Sequence[Stored], kept: TokenSelection | None, deep: DeepWriter | None
    ) -> Iterator[KeyValue | DeepGroup]:
        """Yield what each layer >= l attends to, which those of a group share."""
        leaders = self.layer_map.leaders
        for i in layers:
            if i in leaders:
                group, leader = leaders.index(i), self.layers[i].self_attn
                if deep is None:
                    stored = shared[group] if kept is None else take_rows(shared[group], kept)
                    key_value = leader.expand_key_value(read(stored))
                else:
                    key_value = DeepGroup(group, leader, deep, kept)
            yield key_value

    def normalise(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm, and the family's factor on logits, so that it holds for every head."""
        normalised: torch.Tensor = self.norm(hidden)
        return normalised if self._logits_scaling == 1.0 else normalised / self._logits_scaling

    @property
    def _leaders(self) -> list[SwiftKVAttentionMixin]:
        """The attention modules that own the groups' projections."""
        return [self.layers[i].self_attn for i in self.layer_map.leaders]

    def shared_key_values(self, x: torch.Tensor, context: DecoderContext) -> Sequence[Stored]:
        """Return the contents of each group's cache layer over the whole context; with a cache, append to it first."""
        shared = self.project_key_values(x, context.rotation)
        if context.past_key_values is None:
            return shared
        first = self.layer_map.num_key_value_layers
        return [append(context.past_key_values, *kv, first + group) for group, kv in enumerate(shared)]

    def project_key_values(self, x: torch.Tensor, rotation: Rotation) -> list[KeyValue]:
        """Return K and V of every group from x [batch, num_tokens, hidden_size], in the form that its cache layer
        stores. `rotation`: result of `rotations`."""
        leaders = self._leaders
        if not leaders:
            return []
        rotations = [self.layer_rotations.select(i, rotation) for i in self.layer_map.leaders]
        # After a float32 norm (trained, under autocast) every projection would cast and keep its own narrow copy.
        hidden = self.norm_swiftkv(x).to(x.dtype)
        # Group by group, so that groups sharded separately are each gathered once.
        return [
            leader.shape_key_value([projection(hidden) for projection in leader.input_projections], its_own)
            for leader, its_own in zip(leaders, rotations, strict=True)
        ]

    def deep_suffix(
        self,
        x: torch.Tensor,
        context: DecoderContext,
        first: int | torch.Tensor,
        kept: TokenSelection | None = None,
    ) -> DeepSuffix:
        """Make the writer for a pass whose rows end with their deep tokens.

        Args:
            first: the first deep token, or that of each row, int64 [batch].
            kept: the selection passed to `student_upper`, which includes the deep tokens.
        """
        all_deep = isinstance(first, int) and first == 0 and kept is None
        shared = [] if all_deep else self.project_key_values(x, context.rotation)
        return DeepSuffix(
            shared, first, context.num_tokens, kept, context.past_key_values, self.layer_map.num_key_value_layers
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
        kept: TokenSelection | Callable[[torch.Tensor], TokenSelection] | None = None,
        first_deep: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the final hidden states of the `kept` tokens (None: all), [num_rows, num_kept, hidden_size].

        `kept` may be a function that selects tokens from x. `first_deep`: the first deep token of the pass, or of each
        row, int64 [batch] (None: the last token); it matters only if the student has `deep_leaders`.
        """
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
        first_deep = context.num_tokens - 1 if first_deep is None else first_deep
        if self.swiftkv_enabled:
            x = self.lower(context, partial(bypass_before, first_deep))
        else:
            x = (self.teacher_lower or self.lower)(context)
        kept = kept(x) if callable(kept) else kept
        if self.swiftkv_enabled and self.layer_map.deep_leaders:
            hidden = self._own_upper(x, context, kept, first_deep)
        elif self.swiftkv_enabled:
            hidden = self.student_upper(x, context, kept=kept)
        else:
            hidden = self.teacher_upper(x, context)
            hidden = hidden if kept is None else kept.take(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

    def _own_upper(
        self, x: torch.Tensor, context: DecoderContext, kept: TokenSelection | None, first: int | torch.Tensor
    ) -> torch.Tensor:
        """Run `student_upper` on rows that end with deep tokens, which all run even if they are not `kept`."""
        num_tokens = context.num_tokens
        run, num_deep = kept, num_tokens - (first if isinstance(first, int) else int(first.min()))
        if kept is not None and kept.rows is None:
            if isinstance(kept.tokens, int):
                run = TokenSelection(max(kept.tokens, num_deep))
            elif num_deep:
                run = None
        if run is not None and run.count(num_tokens) == num_tokens and run.rows is None:
            run = None
        hidden = self.student_upper(x, context, kept=run, deep=self.deep_suffix(x, context, first, run))
        if kept is None or run is kept:
            return hidden
        return hidden[:, hidden.shape[1] - kept.tokens :] if isinstance(kept.tokens, int) else kept.take(hidden)
