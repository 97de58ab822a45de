"""Teacher -> student: rewire a pretrained model, start its SwiftKV projections, export without the teacher's.

Source: paper, section 3.1 and 3.2; the calibrated start is described in `calibration.py`. It knows no training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.calibration import TokenBatch, calibrate, collect
from swiftkv_platform.model.families import student_classes
from swiftkv_platform.planning import LayerMap, student_layer_map

_TEACHER_KEYS = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")


def convert(
    teacher: PreTrainedModel | str | Path,
    *,
    num_key_value_layers: int | None = None,
    prefill_reduction: float | None = None,
    key_value_group_size: int = 1,
    early_exit: bool = False,
    calibration: Iterable[TokenBatch] | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Any:
    """A SwiftKV student that shares its frozen weights with `teacher`.

    Args:
        teacher: a causal language model of a known family, or its path or hub id. A model in memory hands over its
            parameters: they are shared, not copied.
        num_key_value_layers: l, 1..L-1.
        prefill_reduction: the share of layers that prefill skips, in place of l (default 0.5).
        key_value_group_size: g of AcrossKV.
        early_exit: add an exit head, started from the teacher's final norm and head.
        calibration: batches of token ids [batch, num_tokens] for the calibrated start; None copies the teacher's
            projections (k and v: the mean over the group).
        dtype: dtype to load a path in; None keeps the checkpoint's.
        revision: hub revision of a path.

    Raises:
        ModelError: unreadable model or unknown family.
        InvalidInputError: l or g out of range, naming what is accepted; raised before weights are read.
    """
    if isinstance(teacher, str | Path):
        config = _read_config(teacher, revision)
        _layer_map(config, num_key_value_layers, prefill_reduction, key_value_group_size)
        student_classes(config.model_type)
        teacher = _read_model(teacher, revision, dtype)
    layer_map = _layer_map(teacher.config, num_key_value_layers, prefill_reduction, key_value_group_size)
    student = _rewire(teacher, layer_map, early_exit)
    copy_projections(student)
    if calibration is not None:
        calibrate(student, collect(student, calibration))
    return student.eval()


def _read_config(path: str | Path, revision: str | None) -> Any:
    try:
        return AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read a model configuration at {str(path)!r}: give a directory with config.json or a hub id that "
            f"this machine can reach ({str(error).splitlines()[0]})",
            field="model.name_or_path",
            value=str(path),
        ) from error


def _read_model(path: str | Path, revision: str | None, dtype: torch.dtype | None) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=dtype or "auto")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read the weights of {str(path)!r}: {str(error).splitlines()[0]}",
            field="model.name_or_path",
            value=str(path),
        ) from error
    return model


def _layer_map(
    config: Any, num_key_value_layers: int | None, prefill_reduction: float | None, group_size: int
) -> LayerMap:
    return student_layer_map(
        config.num_hidden_layers,
        num_key_value_layers=num_key_value_layers,
        prefill_reduction=prefill_reduction,
        key_value_group_size=group_size,
    )


def _rewire(teacher: PreTrainedModel, layer_map: LayerMap, early_exit: bool) -> Any:
    """A student whose original parameters are the teacher's own tensors and whose new ones are uninitialised."""
    classes = student_classes(teacher.config.model_type)
    values = {key: value for key, value in teacher.config.to_dict().items() if key not in _TEACHER_KEYS}
    config = classes.config(
        **values,
        num_key_value_layers=layer_map.num_key_value_layers,
        key_value_group_size=layer_map.key_value_group_size,
        early_exit=early_exit,
    )
    config.dtype = teacher.dtype
    config._attn_implementation = teacher.config._attn_implementation
    with torch.device("meta"):
        student = classes.causal_lm(config)
    student.load_state_dict(teacher.state_dict(), strict=False, assign=True)
    student.model.rotary_emb = teacher.model.rotary_emb  # its buffers are not part of a state dict
    student.tie_weights()
    for name, parameter in list(student.named_parameters()):
        if parameter.is_meta:
            module, _, leaf = name.rpartition(".")
            empty = torch.empty(parameter.shape, dtype=teacher.dtype, device=teacher.device)
            setattr(student.get_submodule(module), leaf, nn.Parameter(empty))
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student


@torch.no_grad()
def copy_projections(student: Any) -> None:
    """The copied start: q from the teacher's q, k and v from the mean over the group, norms and exit head likewise."""
    layer_map, decoder = student.config.layer_map, student.model
    first = layer_map.num_key_value_layers
    for i in range(first, layer_map.num_hidden_layers):
        attention = decoder.layers[i].self_attn
        _set_mean(attention.q_proj_swiftkv, [attention.q_proj])
    for leader in layer_map.leaders:
        group = [decoder.layers[i].self_attn for i in layer_map.group(leader)]
        _set_mean(group[0].k_proj_swiftkv, [attention.k_proj for attention in group])
        _set_mean(group[0].v_proj_swiftkv, [attention.v_proj for attention in group])
    decoder.norm_swiftkv.weight.copy_(decoder.layers[first].input_layernorm.weight)
    if student.config.early_exit:
        student.exit_norm.weight.copy_(decoder.norm.weight)
        student.exit_head.weight.copy_(student.lm_head.weight)


def _set_mean(target: nn.Linear, sources: list[nn.Linear]) -> None:
    target.weight.copy_(torch.stack([source.weight.float() for source in sources]).mean(0))
    if target.bias is not None:
        target.bias.copy_(torch.stack([source.bias.float() for source in sources]).mean(0))
