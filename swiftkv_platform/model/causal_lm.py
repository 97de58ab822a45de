"""The language model around a SwiftKV decoder, for any family: heads, student and teacher mode, loading; and
the classes of each model family, derived from transformers' own."""

from __future__ import annotations

import copy
import importlib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast

from swiftkv_platform import configs
from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES, Family, find_family, refuse_student
from swiftkv_platform.model.attention import HeadAttentionMixin, LatentAttentionMixin
from swiftkv_platform.model.configuration import read_config, refuse_prefill_only
from swiftkv_platform.model.context import TokenSelection, supports_selection
from swiftkv_platform.model.decoder import SwiftKVDecoderLayerMixin, SwiftKVDecoderMixin
from swiftkv_platform.model.generation import SwiftKVGenerationMixin, ThresholdExits
from swiftkv_platform.model.weights.adapters import open_checkpoint
from swiftkv_platform.model.weights.checkpoint import Checkpoint, select_hub_arguments
from swiftkv_platform.model.weights.loading import StoredWeights, load_checked, open_checked
from swiftkv_platform.planning.config import check_no_student_keys
from swiftkv_platform.student_shape import RequestedStudentShape, StudentShape, find_deep_start

_IGNORED_LABEL = -100
"""Label of a position that the loss ignores."""


class SwiftKVForCausalLMMixin(SwiftKVGenerationMixin):
    """Mixin for a family's causal language model."""

    decoder_class: ClassVar[type[SwiftKVDecoderMixin]]
    # Attributes of the family's own causal language model.
    config: Any
    config_class: ClassVar[Any]
    lm_head: nn.Module
    loss_function: Any
    post_init: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        if config.shape.has_exit_head:
            self.exit_norm = type(self.model.norm)(config.hidden_size, eps=config.rms_norm_eps)
            self.exit_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.num_key_value_layers == config.num_hidden_layers:
            # A dense model loads the teacher from a student's checkpoint.
            self._keys_to_ignore_on_load_unexpected = [r"_swiftkv\.", r"^exit_(norm|head)\."]
        self.post_init()

    def swiftkv(self, enabled: bool = True) -> Self:
        """Switch to student mode (True, the default after loading) or teacher mode (False); they share all weights."""
        _check_teacher_mode(self.config, enabled)
        self.model.swiftkv_enabled = enabled
        return self

    def swiftkv_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters trained by default, by name: SwiftKV's projections and norm, and the exit head."""
        return {name: p for name, p in self.named_parameters() if "swiftkv" in name or name.startswith("exit_")}

    def exit_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the exit head to x, the hidden state after layer l - 1: [..., hidden_size] -> [..., vocab_size]."""
        if not self.config.shape.has_exit_head:
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
        exits: ThresholdExits | None = None,
        prompt_length: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits [batch, num_selected, vocab_size] at the positions `logits_to_keep` (0: all), as
        transformers.

        In student mode only the tokens at these positions run through layers >= l; if labels, hidden states or
        attentions are asked for, all tokens do. With `exits`, which `generate()` passes, these are the logits of
        the last token, and rows may stop at layer l with those of the exit head.

        If deep tokens have K and V of their own (`LayerMap.deep_leaders`), the prompt's last `deep_tail` tokens and all
        later ones are deep. `prompt_length`, including padding, is one number for all rows or one each, [batch].
        Without it, the prompt ends before the first counted label; without labels, it ends with the first of
        `logits_to_keep` last tokens, where 0 means the last one.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        ends_prompt = False
        if self.model.layer_map.deep_leaders and tokens is not None:
            seen = 0 if past_key_values is None else int(past_key_values.get_seq_length())
            deep_tail, num_tokens = self.model.layer_map.shape.swiftkv_deep_tail, tokens.shape[1]
            kwargs["first_deep"] = _find_first_deep_token(
                prompt_length, labels, logits_to_keep, num_tokens, seen, deep_tail
            )
            ends_prompt = deep_tail > 1 and isinstance(prompt_length, int) and seen + num_tokens <= prompt_length
        selection: Any = None
        if exits is not None:
            # A tail of several tokens runs all layers, so that a prompt's last token does not exit.
            selection, logits_to_keep = exits.select_without_exits if ends_prompt else exits.select_rows, 0
        elif tokens is not None and labels is None and not self._outputs_every_token(kwargs):
            requested, logits_of_selection = _select_logits(logits_to_keep, tokens.shape[1])
            if requested is not None and supports_selection(self.config, requested):
                selection, logits_to_keep = requested, logits_of_selection
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            selection=selection,
            **kwargs,
        )
        logits = self.lm_head(_slice_logits(outputs.last_hidden_state, logits_to_keep))
        if exits is not None:
            logits = exits.merge_logits(logits)
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

    def _outputs_every_token(self, kwargs: dict[str, Any]) -> bool:
        flags = ("output_hidden_states", "output_attentions")
        return any(kwargs.get(flag) or getattr(self.config, flag, False) for flag in flags)

    @classmethod
    def list_teacher_modules(cls, config: Any) -> list[str]:
        """Return the names of the modules of layers >= l that only the teacher runs."""
        modules = cls.decoder_class.layer_class.attention_class.list_teacher_modules(config)
        layers = range(config.num_key_value_layers, config.num_hidden_layers)
        return [f"model.layers.{i}.self_attn.{module}" for i in layers for module in modules]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load as in transformers, in student mode unless `swiftkv=False` is passed. Weights are read after names and
        shapes of all tensors are checked; an export without the teacher's projections is recognized by their absence.

        For an adapter its base is read too; `base_model=` (a directory or hub id) overrides the adapter's own entry.

        Raises:
            ModelError: tensors are missing, unexpected or of another shape, named in the message; teacher mode of an
                export without the teacher's projections; an adapter's base is missing or another model.
        """
        source, config = pretrained_model_name_or_path, kwargs.pop("config", None)
        if config is None or isinstance(config, str | Path):
            config = read_config(config or source, config_class=cls.config_class, **select_hub_arguments(kwargs))
        # `swiftkv` is True when config.json is read; the Auto classes then set it from their argument.
        enabled: bool = kwargs.pop("swiftkv", config.swiftkv)
        config.swiftkv = True
        refuse_prefill_only(config, source)
        with open_checkpoint(source, kwargs) as (directory, checkpoint):
            if checkpoint is not None:
                config.swiftkv_teacher_weights = cls._has_teacher_projections(config, checkpoint)
            _check_teacher_mode(config, enabled)
            family: Any = super()
            loaded = load_checked(family.from_pretrained, cls, config, directory, checkpoint, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        if directory != source:
            model.config.name_or_path = model.name_or_path = str(source)
        model.swiftkv(enabled)
        return loaded

    @classmethod
    def open_without_weights(
        cls, directory: str | Path, *, config: Any, dtype: torch.dtype | str = "auto"
    ) -> tuple[Any, StoredWeights]:
        """Return the model that `from_pretrained` would load from a directory (not an adapter's) on the meta device,
        and the object that reads its weights. Names and shapes of all tensors are checked first. Raises `ModelError`:
        as `from_pretrained`."""
        config = copy.deepcopy(config)
        config.swiftkv = True
        refuse_prefill_only(config, directory)
        checkpoint = Checkpoint.open(directory)
        config.swiftkv_teacher_weights = cls._has_teacher_projections(config, checkpoint)
        return open_checked(cls, config, checkpoint, dtype=dtype)

    @classmethod
    def _has_teacher_projections(cls, config: Any, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has the modules that only the teacher runs, which an export may lack."""
        teacher = cls.list_teacher_modules(config)
        stored = {name.rpartition(".")[0] for name in checkpoint.shards}
        return not teacher or not stored.isdisjoint(teacher)


def _check_teacher_mode(config: Any, enabled: bool) -> None:
    if not enabled and not config.swiftkv_teacher_weights:
        raise ModelError(
            "teacher mode needs the teacher's projections, but this checkpoint was exported without them",
            field="swiftkv",
            value=False,
        )


def _find_first_deep_token(
    prompt_length: int | torch.Tensor | None,
    labels: torch.Tensor | None,
    logits_to_keep: int | torch.Tensor,
    num_tokens: int,
    num_past: int,
    deep_tail: int,
) -> int | torch.Tensor:
    """Return the index of the first deep token among `num_tokens` tokens after `num_past` cached ones, for all rows or
    per row, [batch]."""
    if isinstance(prompt_length, torch.Tensor):
        return (find_deep_start(prompt_length, deep_tail) - num_past).clamp(0, num_tokens)
    if prompt_length is not None:
        return min(max(find_deep_start(prompt_length, deep_tail) - num_past, 0), num_tokens)
    if labels is not None:
        counts = (labels != _IGNORED_LABEL).long()
        first = torch.where(counts.any(-1), counts.argmax(-1), num_tokens + deep_tail - 1)
        return find_deep_start(first, deep_tail)
    if isinstance(logits_to_keep, int):
        return find_deep_start(num_tokens - max(logits_to_keep, 1) + 1, deep_tail)
    return find_deep_start(num_tokens, deep_tail) if logits_to_keep.numel() else num_tokens


def _slice_logits(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    # With vLLM an older transformers may be installed, which lacks this function and does not support 2D tensors.
    if not hasattr(modeling_utils, "slice_logits_to_keep"):
        return hidden_states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
    return modeling_utils.slice_logits_to_keep(hidden_states, logits_to_keep)


def _select_logits(
    logits_to_keep: int | torch.Tensor, num_tokens: int
) -> tuple[TokenSelection | None, int | torch.Tensor]:
    """Return the tokens that `logits_to_keep` selects, and a `logits_to_keep` to apply among them (0: all)."""
    if isinstance(logits_to_keep, int):
        return (TokenSelection(logits_to_keep) if 0 < logits_to_keep < num_tokens else None), 0
    named = logits_to_keep
    if named.dtype == torch.bool:  # [num_tokens], or [batch, num_tokens] with a different count in each row
        positions = (named if named.ndim == 1 else named.any(0)).nonzero().squeeze(1)
        return TokenSelection(positions), 0 if named.ndim == 1 else named[:, positions]
    if named.ndim == 1:
        return TokenSelection(torch.where(named < 0, named + num_tokens, named)), 0
    positions, inverse = named.unique(return_inverse=True)  # [batch, num_positions]
    return TokenSelection(positions), inverse


_ATTENTION_MIXINS = {"head": HeadAttentionMixin, "latent": LatentAttentionMixin}
_TEACHER_ONLY_KEYS = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")
"""Keys of a teacher's configuration that a student's does not inherit."""


@dataclass(frozen=True)
class StudentClasses:
    """The classes derived for one family."""

    teacher: type[Any]
    """The causal language model of transformers."""
    config: type[Any]
    causal_lm: type[Any]

    def make_config(self, teacher: Any, shape: StudentShape | None = None) -> Any:
        """Make a student's configuration from its teacher's; without `shape` it is dense. Raises `ModelError`: the
        teacher's configuration has a student's keys."""
        of_teacher = teacher.to_dict()
        check_no_student_keys(of_teacher)
        values = {key: value for key, value in of_teacher.items() if key not in _TEACHER_ONLY_KEYS}
        config = self.config(**values, **({} if shape is None else shape.to_config()))
        config.dtype = teacher.dtype
        return config


def _import_teacher_class(family: Family, suffix: str) -> type[Any]:
    """Import the family's class `{prefix}{suffix}` of transformers."""
    module = importlib.import_module(family.get_transformers_import_path("modeling"))
    teacher: type[Any] = getattr(module, family.get_teacher_class_name(suffix))
    return teacher


def _derive_class(family: Family, suffix: str, mixin: type, **members: Any) -> type[Any]:
    """Define `{prefix}SwiftKV{suffix}`, importable from this module: `mixin` before the family's own class."""
    teacher = _import_teacher_class(family, suffix)
    name = f"{family.class_prefix}SwiftKV{suffix}"
    body = {"__module__": __name__, "__qualname__": name, **members}
    student = types.new_class(name, (mixin, teacher), exec_body=lambda namespace: namespace.update(body))
    globals()[name] = student
    return student


def _build_classes(family: Family) -> StudentClasses:
    """Make the classes of one family and register them with transformers.

    transformers keeps experts fused in memory and one by one on disk, and looks up the conversion by `model_type`, so a
    student gets its teacher's entry.
    """
    config = configs.CONFIG_CLASSES[family.model_type]
    attention = _derive_class(family, "Attention", _ATTENTION_MIXINS[family.attention])
    layer = _derive_class(family, "DecoderLayer", SwiftKVDecoderLayerMixin, attention_class=attention)
    # transformers detects grouped experts in the source of a class's module, so a derived class takes its answer.
    shared = {
        "config_class": config,
        "_can_set_experts_implementation_cached_value": _import_teacher_class(
            family, "Model"
        )._can_set_experts_implementation(),
    }
    decoder = _derive_class(family, "Model", SwiftKVDecoderMixin, layer_class=layer, **shared)
    causal_lm = _derive_class(family, "ForCausalLM", SwiftKVForCausalLMMixin, decoder_class=decoder, **shared)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    if (conversions := get_checkpoint_conversion_mapping(family.model_type)) is not None:
        register_checkpoint_conversion_mapping(config.model_type, conversions, overwrite=True)
    return StudentClasses(_import_teacher_class(family, "ForCausalLM"), config, causal_lm)


configs.register_configs()
STUDENT_CLASSES = {model_type: _build_classes(family) for model_type, family in FAMILIES.items()}


def get_student_classes(model_type: str) -> StudentClasses:
    """Return the classes of a family, given the `model_type` of a teacher or a student. Raises `ModelError`: it is
    unknown; the message lists the families."""
    return STUDENT_CLASSES[find_family({"model_type": model_type}).model_type]


def make_student_config(teacher: Any, request: RequestedStudentShape) -> Any:
    """Make a student's configuration from its teacher's. Raises the errors of `convert` that need no weights."""
    refuse_student(teacher.model_type, teacher.name_or_path, "model.name_or_path")
    classes = get_student_classes(teacher.model_type)
    return classes.make_config(teacher, request.resolve(teacher.num_hidden_layers, teacher.num_attention_heads))
