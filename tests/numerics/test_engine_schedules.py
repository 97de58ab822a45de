"""Random schedules of arrivals, chunks, prefix hits, aborts, exits and drafts change no token and leak no block.

SWIFTKV_SCHEDULES=1000 python -m pytest tests/numerics/test_engine_schedules.py
"""

import os
import random
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from swiftkv_platform.engine import LLMEngine, memory
from swiftkv_platform.engine.varlen import reference_varlen_attn
from swiftkv_platform.model import convert
from tests.support.engine_schedules import (
    ServedModel,
    check_outputs,
    count_events,
    make_random_arrivals,
    make_random_config,
    randomize_exit_head,
    run_schedule,
)
from tests.support.tiny_models import random_teacher

NUM_SCHEDULES = int(os.environ.get("SWIFTKV_SCHEDULES", "29"))
FIRST = 35
"""First seed, chosen so that a few schedules already have every kind of event."""
MODELS: dict[str, dict[str, Any]] = {
    "g1": {"num_key_value_layers": 3, "key_value_group_size": 1, "early_exit": True},
    "g2": {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True},
    "short-group": {"num_key_value_layers": 3, "key_value_group_size": 2, "early_exit": True},
    "dense": {},
    "own-g1": {"num_key_value_layers": 3, "early_exit": True, "decode_key_value": "own"},
    "own-g2": {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True, "decode_key_value": "own"},
    "bypassing": {"prefill_layers": [0, 2], "early_exit": True, "decode_key_value": "own"},
    "tail": {"num_key_value_layers": 2, "early_exit": True, "decode_key_value": "own", "deep_tail": 4},
    "bypassing-tail": {"prefill_layers": [0, 2], "early_exit": True, "decode_key_value": "own", "deep_tail": 16},
}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    made = {}
    for name, arguments in MODELS.items():
        model: Any = random_teacher(seed=1)
        if arguments:
            model = randomize_exit_head(convert(model, **arguments))
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        made[name] = ServedModel.load(directory)
    return made


@pytest.mark.slow("dozens of schedules, each token of which is compared with a plain forward pass")
@pytest.mark.timeout(NUM_SCHEDULES * 10 + 300)
def test_random_schedules_give_the_tokens_of_the_plain_forward(subjects: dict[str, ServedModel]) -> None:
    """For both ways that attention reads the cache: runs of slots, and a GPU's block tables."""
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + NUM_SCHEDULES):
        draw = random.Random(seed)
        name, operator = draw.choice(list(subjects)), (None, reference_varlen_attn)[seed // 2 % 2]
        subject = subjects[name]
        arrivals = make_random_arrivals(draw, subject.plain.config.vocab_size, exits=name != "dense")
        config = make_random_config(draw, subject, arrivals)
        with patch.object(memory, "choose_operator", return_value=operator):
            engine = LLMEngine(subject.loaded, config)
        try:
            finished = run_schedule(engine, arrivals)
            check_outputs(subject, arrivals, finished)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed} on {name} with {config}: {error}") from error
        seen["preemptions"] += engine.state.num_preemptions
        seen += count_events([output for one in finished.values() for output in one])
    kinds = ("preemptions", "cached", "exited", "full", "accepted", "rejected", "prompt logprobs")
    assert all(seen[kind] > 0 for kind in kinds), f"a kind of event never happened: {seen}"
