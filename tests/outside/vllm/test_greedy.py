"""The plugin's greedy text, eager and in float32, equals that of the project's own forward pass and the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from vllm import SamplingParams

from swiftkv_platform.families import is_served_by_vllm
from swiftkv_platform.model import export
from tests.outside.vllm.engines import (
    CHOSEN,
    OWN,
    SHAPE,
    TAIL,
    complete,
    expected,
    make_student,
    prompts,
    recorded_sizes,
    runner,
    serving,
)
from tests.outside.vllm.interpreted import SECOND_RUNNER
from tests.support.tiny_models import FAMILY_CONFIGS

SERVED = [name for name in FAMILY_CONFIGS if is_served_by_vllm(name.split("-")[0])]


SHAPES_IN_TURN = {
    "own": (OWN | {"key_value_group_size": 1}, OWN),
    "tail": (TAIL, OWN | {"deep_tail": 64}),
    "chosen": (CHOSEN, CHOSEN | {"deep_tail": 16}, CHOSEN | {"prefill_layers": [2], "key_value_group_size": 2}),
}
"""Kinds of shapes, of which families have one in turn."""


@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(name, SHAPE, id=name) for name in SERVED]
    + [
        pytest.param(name, shapes[at % len(shapes)], id=f"{name}-{kind}")
        for kind, shapes in SHAPES_IN_TURN.items()
        for at, name in enumerate(SERVED)
    ],
)
def test_every_family(name: str, shape: dict[str, Any], tmp_path: Path) -> None:
    make_student(tmp_path, name, shape=shape)
    batch = prompts()
    with serving(tmp_path) as llm:
        assert runner(llm).vllm_config.use_v2_model_runner == SECOND_RUNNER
        with recorded_sizes(llm) as sizes:
            assert complete(llm, batch) == expected(tmp_path, batch)
    num_tokens = sum(map(len, batch))
    num_deep = sum(min(len(ids), shape.get("deep_tail", 1)) for ids in batch)
    assert sizes[0] == (num_tokens, num_deep), "only a prompt's deep tokens enter the upper half"
    assert set(sizes[1:]) == {(len(batch), len(batch))}, "generated tokens run all layers"


@pytest.mark.parametrize(
    "shape",
    [
        {"num_key_value_layers": 1, "key_value_group_size": 1},
        {"num_key_value_layers": 2, "key_value_group_size": 3},
        {"num_key_value_layers": 1, "key_value_group_size": 2, "own_output_projection": True},
        {"num_key_value_layers": 4, "key_value_group_size": 1, "early_exit": True},
        OWN | {"num_key_value_layers": 1, "key_value_group_size": 3, "own_output_projection": True},
    ],
    ids=["l1-g1", "l2-g3", "l1-g2-output", "l4-g1-exit-head", "l1-g3-output-own"],
)
def test_layers_and_groups(shape: dict[str, Any], tmp_path: Path) -> None:
    make_student(tmp_path, "qwen3", shape=shape)
    batch = prompts()
    with serving(tmp_path) as llm:
        assert complete(llm, batch) == expected(tmp_path, batch)


def test_teacher_mode_serves_the_teacher(llama: Path) -> None:
    batch = prompts()
    with serving(llama, hf_overrides={"swiftkv": False}) as llm:
        assert not runner(llm).cache_config.kv_sharing_fast_prefill
        taught = complete(llm, batch)
    assert taught == expected(llama, batch, swiftkv=False)
    assert taught != expected(llama, batch)


def test_export_without_its_teacher(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "served")
    batch = prompts()
    with serving(tmp_path / "served") as llm:
        assert complete(llm, batch) == expected(llama, batch)


def test_reference_checkpoints(golden: tuple[Path, Path]) -> None:
    directory, outputs = golden
    greedy = load_file(outputs)["greedy"]
    params = SamplingParams(max_tokens=greedy.shape[1] - 20, temperature=0.0, ignore_eos=True, detokenize=False)
    with serving(directory) as llm:
        assert complete(llm, greedy[:, :20].tolist(), params) == greedy[:, 20:].tolist()
