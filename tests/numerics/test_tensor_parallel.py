"""Two processes that share a model over gloo answer as one does, for every schedule and family."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.loading import load_model
from swiftkv_platform.engine.memory import get_layer_shapes
from swiftkv_platform.engine.ranks import RankProcesses
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert, export, export_adapter
from swiftkv_platform.model.weights.adapters import check_adapter_base
from tests.support.engine_schedules import (
    ServedModel,
    check_outputs,
    count_events,
    make_drafts_free,
    make_random_arrivals,
    randomize_exit_head,
    run_schedule,
)
from tests.support.tiny_models import disturb, family_teacher, random_teacher

STUDENT = {"num_key_value_layers": 3, "key_value_group_size": 2, "early_exit": True}
SMALL = {"max_num_batched_tokens": 16, "block_size": 4, "max_num_seqs": 4}
"""Settings under which prompts are read in chunks."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
starts = pytest.mark.slow("starts a process, which takes its time to import")
in_soak = pytest.mark.soak("starts a process more")


@contextmanager
def sharing(directory: Path, size: int = 2, **config: Any) -> Iterator[LLMEngine]:
    with make_drafts_free():
        engine = LLMEngine.from_pretrained(directory, EngineConfig(tensor_parallel_size=size, num_threads=1, **config))
    try:
        yield engine
    finally:
        engine.close()


def saved(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(1)
    shared = [draw.randrange(vocab_size) for _ in range(30)]
    own = [[draw.randrange(vocab_size) for _ in range(length)] for length in (3, 9, 40)]
    return [*own, shared, shared + own[0], shared + own[1]]


@starts
@pytest.mark.parametrize(
    "form",
    [
        {"prefill_layers": [0, 2], "early_exit": True, "decode_key_value": "own", "deep_tail": 7},
        pytest.param(STUDENT | {"decode_key_value": "own"}, marks=in_soak),
        pytest.param(STUDENT, marks=in_soak),
    ],
)
def test_random_schedules_of_two_ranks_give_the_tokens_of_the_plain_forward(tmp_path: Path, form: Any) -> None:
    """Chunks, prefix hits, exits, drafts of both kinds and prompt log-probabilities are as with one rank. When a rank
    dies, the step fails and no process is left."""
    teacher = random_teacher(seed=1, attention_bias=True, mlp_bias=True)
    student = randomize_exit_head(convert(teacher, **form, own_output_projection=True))
    subject = ServedModel.load(saved(student, tmp_path))
    token = sum(2 * shape.num_heads * shape.dim for shape, _ in get_layer_shapes(student.config, 2)) * 4
    with sharing(tmp_path, **SMALL, kv_cache_bytes=40 * 4 * token) as engine:
        assert engine.num_blocks == 40, "each rank caches half of the heads"
        seen: Counter[str] = Counter()
        for seed in range(4):
            draw = random.Random(seed)
            arrivals = [one for one in make_random_arrivals(draw, 258, exits=True) if len(one.prompt) < 140]
            finished = run_schedule(engine, arrivals)
            check_outputs(subject, arrivals, finished)
            seen += count_events([output for one in finished.values() for output in one])
        assert all(seen[kind] for kind in ("cached", "exited", "accepted")), seen
        [process] = engine._rank_processes._processes
        engine.add_request([1, 2, 3])
        process.kill()
        process.wait()
        with pytest.raises((OSError, RuntimeError)):
            engine.step()
        engine.close()
        assert process.poll() is not None


@starts
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v2-lora",
        *(
            pytest.param(name, marks=in_soak)
            for name in ("dense", "qwen3", "qwen3_moe", "olmo3", "phi3", "phi3-partial", "gemma3_text")
        ),
    ],
)
def test_every_kind_of_layer_is_shared(tmp_path: Path, family: str) -> None:
    """Head norms (per head and over all), experts, latents, fused projections; weights with fused rows and without.
    DeepSeek-V2 covers experts too."""
    teacher = random_teacher(seed=2) if family == "dense" else family_teacher(family)
    directory = saved(teacher if family == "dense" else disturb(convert(teacher, **STUDENT)), tmp_path)
    params = GREEDY if family == "dense" else replace(GREEDY, early_exit=EarlyExit("lossless", 0.0))
    fused = {"fuse_weights": family not in ("qwen3", "phi3-partial")}
    expected = LLMEngine.from_pretrained(directory, EngineConfig(**SMALL, **fused)).generate(prompts(258), GREEDY)
    with sharing(directory, **SMALL, **fused) as engine:
        found = engine.generate(prompts(258), params)
        engine.assert_consistent()
        assert sum(output.num_cached_tokens for output in found) > 0
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@starts
@in_soak
def test_two_ranks_cut_integers_as_floats(tmp_path: Path) -> None:
    """Prompts get the log-probabilities of one rank, up to the rounding of a sum in two parts."""
    teacher = family_teacher("phi3", hidden_size=128, intermediate_size=128)  # 64 columns per rank: whole groups
    export(convert(teacher, num_key_value_layers=2).to(torch.bfloat16), tmp_path / "served", quantize="mixed")
    scored = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    found = []
    for size in (1, 2):
        with sharing(tmp_path / "served", size, **SMALL, kv_cache_bytes=1 << 20) as engine:
            outputs = engine.generate(prompts(100), scored)
            rows = [one for output in outputs for one in output.prompt_logprobs or () if one is not None]
            found.append(torch.tensor([next(iter(one.values())) for one in rows]))
    assert (found[0] - found[1]).abs().max() < 0.1


@in_soak
def test_an_adapter_is_put_together_once_for_all_ranks(tmp_path: Path) -> None:
    base = saved(random_teacher(seed=4), tmp_path / "base")
    full = saved(disturb(convert(base, **STUDENT)), tmp_path / "full")
    export_adapter(full, tmp_path / "adapter", base=base)
    expected = LLMEngine.from_pretrained(full, EngineConfig(**SMALL)).generate(prompts(258), GREEDY)
    with (
        patch("swiftkv_platform.model.weights.adapters.check_adapter_base", wraps=check_adapter_base) as checked,
        sharing(tmp_path / "adapter", **SMALL) as engine,
    ):
        found = engine.generate(prompts(258), GREEDY)
        assert checked.call_count == 1
        assert engine._blocks._fingerprint.startswith(load_model(tmp_path / "adapter", EngineConfig()).digest)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@starts
@in_soak
def test_a_rank_that_dies_while_it_loads_fails_the_start(tiny_teacher: Path) -> None:
    processes: list[Any] = []

    def start(*arguments: Any) -> RankProcesses:
        leader = real_start(*arguments)
        processes.extend(leader._processes)
        processes[0].kill()
        return leader

    real_start = RankProcesses.start
    with patch.object(RankProcesses, "start", start), pytest.raises(OSError, match="rank 1 of tensor_parallel_size 2"):
        LLMEngine.from_pretrained(tiny_teacher, EngineConfig(tensor_parallel_size=2))
    assert [process.poll() is not None for process in processes] == [True]


@pytest.mark.parametrize(
    ("size", "which"), [(3, "num_attention_heads 8 and num_key_value_heads 2"), (4, "num_key_value_heads 2")]
)
def test_heads_that_do_not_divide_are_refused_before_anything_starts(tiny_teacher: Path, size: int, which: str) -> None:
    with pytest.raises(ModelError, match=which) as caught:
        LLMEngine.from_pretrained(tiny_teacher, EngineConfig(tensor_parallel_size=size))
    assert caught.value.field == "tensor_parallel_size"
    assert caught.value.value == size
