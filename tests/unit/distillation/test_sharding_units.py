"""Modules whose weights are gathered together, in every family, and the sizes that memory is planned with."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from swiftkv_platform.distillation.model import iter_sharding_units
from swiftkv_platform.model.causal_lm import get_student_classes, make_student_config
from swiftkv_platform.planning import read_architecture
from swiftkv_platform.planning.architecture import count_student_parameters
from swiftkv_platform.student_shape import RequestedStudentShape, Sharing
from tests.support.parameters import few
from tests.support.tiny_models import FAMILY_CONFIGS

DEEP = 24
"""Layers, of which two keep their own K and V: projections of 22 groups are larger than most layers."""

BY_LAYER = ("layer_types", "no_rope_layers")


def make_decoder(family: str, sharing: Sharing = "gqa", *, own_output_projection: bool = False) -> Any:
    teacher = copy.deepcopy(FAMILY_CONFIGS[family])
    config = make_student_config(
        type(teacher)(**{**teacher.to_dict(), "num_hidden_layers": DEEP, **dict.fromkeys(BY_LAYER)}),
        RequestedStudentShape(num_key_value_layers=2, sharing=sharing, own_output_projection=own_output_projection),
    )
    with torch.device("meta"):
        return get_student_classes(teacher.model_type).causal_lm(config).model


def sizes(units: list[list[nn.Module]], apart: set[nn.Parameter]) -> list[int]:
    """Number of parameters of each unit, without those in `apart`, to which they are added."""
    found = []
    for unit in units:
        own = {p for module in unit for p in module.parameters()} - apart
        apart |= own
        found.append(sum(parameter.numel() for parameter in own))
    return found


def split(decoder: Any) -> tuple[list[list[nn.Module]], list[list[nn.Module]]]:
    """Return the units of what groups of layers share, and the units of the layers."""
    units = [unit if isinstance(unit, list) else [unit] for unit in iter_sharding_units(decoder)]
    return units[:-DEEP], units[-DEEP:]


@pytest.mark.parametrize("family", few(FAMILY_CONFIGS))
def test_units_are_those_that_memory_is_planned_with(family: str) -> None:
    """No shared unit is larger than a layer, and the units together hold all parameters of the layers."""
    for own_output_projection in (False, True):
        decoder = make_decoder(family, own_output_projection=own_output_projection)
        model, layer_map = read_architecture(decoder.config.to_dict()), decoder.layer_map
        planned = count_student_parameters(model, layer_map)
        seen: set[nn.Parameter] = set()
        shared, layers = (sizes(units, seen) for units in split(decoder))
        assert len(seen) == len(set(decoder.layers.parameters()))
        assert max(shared) == planned.shared_key_value
        assert max(shared) <= max(layers)
        assert max(layers) == pytest.approx(planned.largest_layer, rel=0.01)  # norms of heads are units by themselves


def test_projections_of_many_groups_are_several_units() -> None:
    """Projections that expand latents are units of their own: they run with the first layer of a group, long after the
    latent is computed."""
    shared, _ = split(make_decoder("llama", "mha"))
    assert len(shared) > 1
    assert sum(map(len, shared)) == 2 * (DEEP - 2)
    decoder = make_decoder("deepseek_v2")
    expanding = [decoder.layers[i].self_attn.kv_b_proj_swiftkv for i in decoder.layer_map.leaders]
    shared, _ = split(decoder)
    assert [unit for unit in shared if unit[0] in expanding] == [[module] for module in expanding]
