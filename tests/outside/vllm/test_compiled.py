"""The compiled halves give the text of the eager ones. Compilation is slow, so few engines cover many kinds of
steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.config import CompilationMode

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

COMPILED = {"enforce_eager": False, "max_num_batched_tokens": 64, "max_num_seqs": 8}


def halves_are_compiled(llm: LLM) -> bool:
    decoder = runner(llm).model.model
    mode = runner(llm).vllm_config.compilation_config.mode
    return mode != CompilationMode.NONE and not (decoder.lower_parts[0].do_not_compile or decoder.upper.do_not_compile)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama", SHAPE),
        ("qwen2-mixed", SHAPE),
        ("qwen3_moe", SHAPE),
        ("qwen2-mixed", OWN),
        ("qwen3_moe", OWN | {"key_value_group_size": 1}),
        ("olmo3", SHAPE),
        ("gemma3_text", OWN),
        ("gemma3_text", CHOSEN),
        ("olmo3", CHOSEN | {"prefill_layers": [2], "deep_tail": 16}),
        ("llama", TAIL),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(map(str, given.values())),
)
def test_text_of_the_compiled_halves(name: str, shape: dict[str, Any], tmp_path: Path) -> None:
    """One family of each kind: plain, biases with mixed windows, head norms with experts, post-norms, RoPE by layer
    type; each run has chunks, mixed batches and whole prompts."""
    make_student(tmp_path, name, shape=shape)
    batch = prompts((100, 3, 41, 17))
    with serving(tmp_path, **COMPILED) as llm, recorded_sizes(llm) as sizes:
        assert halves_are_compiled(llm)
        assert complete(llm, batch) == expected(tmp_path, batch)
        assert complete(llm, batch[1:2]) == expected(tmp_path, batch[1:2])
    assert {(lower > upper, upper > 1) for lower, upper in sizes} >= {(True, True), (True, False), (False, True)}


def test_text_of_a_compiled_reference_checkpoint(golden: tuple[Path, Path]) -> None:
    directory, _ = golden
    batch = prompts((20, 70))
    with serving(directory, **COMPILED) as llm:
        assert halves_are_compiled(llm)
        assert complete(llm, batch) == expected(directory, batch)


def test_text_of_the_compiled_teacher(llama: Path) -> None:
    batch = prompts((70, 9))
    with serving(llama, hf_overrides={"swiftkv": False}, **COMPILED) as llm:
        assert not runner(llm).model.model.dense.do_not_compile
        assert complete(llm, batch) == expected(llama, batch, swiftkv=False)
