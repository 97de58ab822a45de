"""A student's tmp_path, served as its teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert, export
from tests.unit.engine.tiny_models import make_model, save_swiftkv

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("early_exit", [False, True])
def test_the_teacher_of_a_student_is_served(tmp_path: Path, early_exit: bool) -> None:
    student = convert(make_model(), num_key_value_layers=2, key_value_group_size=2, early_exit=early_exit)
    student.save_pretrained(tmp_path)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).swiftkv(False)
    engine = LLMEngine.from_pretrained(tmp_path, EngineConfig(dtype="float32", swiftkv=False))
    assert engine.model_config.num_key_value_layers == engine.model_config.num_hidden_layers
    answers = engine.generate(PROMPTS, GREEDY, progress=False)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = teacher.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()
    students = LLMEngine.from_pretrained(tmp_path, EngineConfig(dtype="float32")).generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in students] != [answer.token_ids for answer in answers]


def test_a_student_without_its_teacher_is_refused(tmp_path: Path) -> None:
    export(save_swiftkv(tmp_path / "whole"), tmp_path / "alone", teacher=False)
    with pytest.raises(ModelError, match=r"layers\.\d+\.self_attn\.q_proj"):
        LLMEngine.from_pretrained(tmp_path / "alone", EngineConfig(swiftkv=False))
