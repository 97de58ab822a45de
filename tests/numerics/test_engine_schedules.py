"""Random schedules: arrivals, chunks, small caches, prefix hits, aborts, exits, drafts: no other token, no lost block.

SWIFTKV_SCHEDULES=1000 python -m pytest tests/numerics/test_engine_schedules.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.engine import EngineConfig, LLMEngine, memory
from swiftkv_platform.engine.loading import load_model
from swiftkv_platform.engine.varlen import reference_varlen_attn
from swiftkv_platform.model import convert, load_dense
from swiftkv_platform.model.packed_attention import VarlenOperator
from tests.engine_schedules import Subject, check_outputs, random_arrivals, random_config, run
from tests.tiny_models import random_teacher

NUM_SCHEDULES = int(os.environ.get("SWIFTKV_SCHEDULES", "50"))
MODELS: dict[str, dict[str, Any]] = {
    "g1": {"num_key_value_layers": 3, "key_value_group_size": 1, "early_exit": True},
    "g2": {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True},
    "short-group": {"num_key_value_layers": 3, "key_value_group_size": 2, "early_exit": True},
    "dense": {},
}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    made = {}
    for name, arguments in MODELS.items():
        directory = tmp_path_factory.mktemp(name)
        made[name] = _subject(directory, arguments)
    return made


def _subject(directory: Path, arguments: dict[str, Any]) -> Subject:
    model: Any = random_teacher(seed=1)
    if arguments:
        model = convert(model, **arguments)
        with torch.no_grad():
            for name, parameter in model.swiftkv_parameters().items():
                parameter.add_(torch.randn_like(parameter) * (0.4 if name.startswith("exit_head") else 0.05))
    model.save_pretrained(directory)
    plain = AutoModelForCausalLM.from_pretrained(directory) if arguments else load_dense(directory)
    return Subject(load_model(directory, EngineConfig()), plain.eval())


@pytest.mark.timeout(NUM_SCHEDULES * 10 + 300)
@pytest.mark.parametrize("operator", [None, reference_varlen_attn], ids=["runs", "block tables"])
def test_random_schedules_give_the_tokens_of_the_plain_forward(
    subjects: dict[str, Subject], operator: VarlenOperator | None
) -> None:
    """However attention reads the cache: by runs of slots, or by the block tables of a GPU."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        draw = random.Random(seed)
        name = draw.choice(list(subjects))
        subject = subjects[name]
        arrivals = random_arrivals(draw, subject.plain.config.vocab_size, exits=name != "dense")
        config = random_config(draw, subject, arrivals)
        with patch.object(memory, "choose_operator", return_value=operator):
            engine = LLMEngine(subject.loaded, config)
        try:
            finished = run(engine, arrivals)
            check_outputs(subject, arrivals, finished)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed} on {name} with {config}: {error}") from error
        outputs = [output for one in finished.values() for output in one]
        seen["preemptions"] += engine.num_preemptions
        seen["cached tokens"] += sum(output.num_cached_tokens for output in outputs)
        seen["exits"] += sum(output.num_exited_tokens for output in outputs)
        seen["full tokens"] += sum(len(output.token_ids) - output.num_exited_tokens for output in outputs)
        seen["accepted drafts"] += sum(output.num_accepted_tokens for output in outputs)
        seen["rejected drafts"] += sum(output.num_draft_tokens - output.num_accepted_tokens for output in outputs)
        seen["prompt logprobs"] += sum(output.prompt_logprobs is not None for output in outputs)
    kinds = ("preemptions", "cached tokens", "exits", "full tokens", "prompt logprobs")
    drafts = ("accepted drafts", "rejected drafts")
    assert all(seen[kind] > 0 for kind in (*kinds, *drafts)), f"a kind of event never happened: {seen}"
