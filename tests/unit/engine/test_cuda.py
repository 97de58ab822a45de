"""Steps of the engine on fake CUDA tensors: devices agree, and the host waits no more often than it must."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, RequestOutput, SamplingParams, ranks
from swiftkv_platform.engine.loading import LoadedModel, prepare_model
from swiftkv_platform.engine.memory import DeviceMemory, make_cache
from swiftkv_platform.engine.sharding import shard_model
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.causal_lm import get_student_classes
from swiftkv_platform.student_shape import StudentShape
from tests.support.engine_schedules import make_drafts_free
from tests.support.fakes.cuda import (
    ALLOCATED_MEMORY,
    DEVICE,
    FREE_MEMORY,
    PEAK_MEMORY,
    TOTAL_MEMORY,
    DeviceLog,
    fake_cuda,
)
from tests.support.tiny_models import FAMILY_CONFIGS

pytestmark = pytest.mark.slow("runs models on fake devices")

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
wide = pytest.mark.soak("every family")
SUBJECTS = [
    ("llama", True),
    ("llama", False),
    ("deepseek_v2-lora", True),
    *(pytest.param(family, True, marks=wide) for family in ("mistral", "qwen3", "mixtral", "qwen3_moe")),
]
"""Families, and whether the model is a student."""


@pytest.fixture
def log() -> Iterator[DeviceLog]:
    with fake_cuda() as device_log:
        yield device_log


def model_of(family: str, *, student: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model whose weights have no values."""
    teacher = copy.deepcopy(FAMILY_CONFIGS[family])
    if hasattr(teacher, "qk_nope_head_dim"):
        teacher.qk_nope_head_dim = 16  # FlashAttention takes head sizes that are multiples of 8
    classes = get_student_classes(family.partition("-")[0])
    shape = StudentShape(num_key_value_layers=2, key_value_group_size=2, early_exit=True) if student else None
    with torch.device(DEVICE):
        return classes.causal_lm._from_config(classes.make_config(teacher, shape), dtype=dtype).eval()


def open_engine(family: str = "llama", *, student: bool = True, **config: Any) -> LLMEngine:
    dtype = config.pop("model_dtype", torch.bfloat16)
    settings = EngineConfig(**{"max_num_batched_tokens": 32, "kv_cache_bytes": 1 << 26, **config})
    model = prepare_model(model_of(family, student=student, dtype=dtype), settings)
    with make_drafts_free():
        return LLMEngine(LoadedModel(model.config, None, frozenset(), 256, model, "digest"), settings)


def prompts() -> list[list[int]]:
    """A prompt of several chunks, one of a single token, and one that repeats itself."""
    return [list(range(40)), [5], [1, 2, 3, 4] * 3]


def steps(
    engine: LLMEngine, log: DeviceLog, params: Any, *, some: list[list[int]] | None = None
) -> Iterator[list[RequestOutput]]:
    """Yield the outputs of each step; `log` holds that step alone. `params`: one for all prompts, or one each."""
    asked = some or prompts()
    for prompt, each in zip(
        asked, [params] * len(asked) if isinstance(params, SamplingParams) else params, strict=True
    ):
        engine.add_request(prompt, each)
    while engine.has_unfinished_requests:
        log.clear()
        outputs = engine.step()
        assert all(output.error is None for output in outputs)
        yield outputs
    engine.assert_consistent()


@pytest.mark.parametrize(("family", "student"), SUBJECTS)
def test_a_step_waits_once_and_copies_once(family: str, student: bool, log: DeviceLog) -> None:
    engine = open_engine(family, student=student)
    for outputs in steps(engine, log, GREEDY):
        assert len(log.waits) == bool(outputs), log.waits
        assert log.copies == 1
        assert "aten.scaled_dot_product_attention" not in log.kernels
        # A step that chooses no token stops at layer l.
        assert log.kernels["torch_attn._varlen_attn"] == (5 if outputs or not student else 2)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_a_decode_of_many_sequences_launches_as_many_kernels_as_of_few(temperature: float, log: DeviceLog) -> None:
    """Each operator is a kernel that the host launches, and a small model's step takes as long as its launches."""
    params, found = SamplingParams(max_tokens=3, temperature=temperature, top_p=0.9, ignore_eos=True), {}
    for count in (4, 32):
        engine = open_engine(max_num_seqs=count, max_num_batched_tokens=1024)
        for outputs in steps(engine, log, params, some=[[1] * (3 + index) for index in range(count)]):
            found[count] = sum(log.kernels.values()), log.kernels["torch_attn._varlen_attn"], log.copies, len(log.waits)
            assert len(outputs) == count
    assert found[32] == found[4]
    assert found[4][1::2] == (5, 1), "attention of each layer is one operator, and there is one wait"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_run(dtype: torch.dtype, log: DeviceLog) -> None:
    for outputs in steps(open_engine(model_dtype=dtype), log, GREEDY, some=[[1, 2, 3], [4]]):
        assert len(log.waits) == bool(outputs), log.waits


def test_caches_that_the_operator_cannot_read_are_refused(log: DeviceLog) -> None:
    for kv_cache_dtype in ("fp8", "int8", "float32"):
        message = r"kv_cache_dtype is .* attention on a GPU reads K and V"
        with pytest.raises(InvalidInputError, match=message) as error:
            open_engine(kv_cache_dtype=kv_cache_dtype)
        assert error.value.field == "kv_cache_dtype"
    with pytest.raises(InvalidInputError, match="block_size is 16"):
        open_engine(block_size=16)


def test_the_cache_takes_what_the_largest_step_leaves(log: DeviceLog) -> None:
    """The cache gets 0.9 of the memory, less what was in use before the largest step and what that step took."""
    assert open_engine(kv_cache_bytes=None).num_blocks == 64, "no more than the sequences can use"
    assert log.kernels["torch_attn._varlen_attn"] == 5, "the step was run, with every token in every layer"
    engine = open_engine(kv_cache_bytes=None, max_num_seqs=1 << 20)
    block = 256 * 4 * 2 * 2 * 8 * 2  # tokens, cache layers, K and V, heads, head size, bytes
    used, step = TOTAL_MEMORY - FREE_MEMORY, PEAK_MEMORY - ALLOCATED_MEMORY
    left = int(0.9 * TOTAL_MEMORY) - used - step
    assert engine.num_blocks == left // block + 32 // 256 + 32 + 1, "plus the blocks that the step used"
    crowded = DeviceMemory(*(gibibytes << 30 for gibibytes in (80, 4, 16, 17)))
    with (
        patch("swiftkv_platform.engine.llm_engine.measure_memory", return_value=crowded),
        pytest.raises(
            InvalidInputError,
            match=f"of {80 << 30} bytes of GPU memory, .* other processes and the driver hold {60 << 30}",
        ),
    ):
        open_engine(kv_cache_bytes=None)


def test_choosing_a_token_waits_for_the_token_alone(log: DeviceLog) -> None:
    shared: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    params = [
        SamplingParams(**shared, temperature=1.0),
        SamplingParams(**shared, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1),
        SamplingParams(**shared, temperature=0.0, **penalties, logit_bias={3: 1.0, 7: -1.0}),
    ]
    for outputs in steps(open_engine(), log, params):
        assert len(log.waits) == bool(outputs), log.waits


def test_log_probabilities_take_one_wait_more(log: DeviceLog) -> None:
    """Log-probabilities of a token take one wait more; those of a prompt, one more for each prompt."""
    for outputs in steps(open_engine(), log, replace(GREEDY, logprobs=2)):
        assert len(log.waits) == 2 * bool(outputs), log.waits
    for outputs in steps(open_engine(), log, replace(GREEDY, prompt_logprobs=1)):
        assert len(log.waits) <= 1 + 2 * 3, (outputs, log.waits)


@pytest.mark.parametrize("threshold", [0.5, 0.99], ids=["all exit", "none does"])
def test_a_threshold_exit_waits_for_the_exit_head_too(threshold: float, log: DeviceLog) -> None:
    params = replace(GREEDY, early_exit=EarlyExit("threshold", threshold))
    outputs: list[RequestOutput] = []
    for outputs in steps(open_engine(), log, params):
        assert len(log.waits) == 2 * bool(outputs), log.waits
    assert bool(outputs[0].num_exited_tokens) == (threshold < 0.75)


def test_each_draft_of_the_exit_head_waits_for_confidence_and_token(log: DeviceLog) -> None:
    params = replace(GREEDY, max_tokens=5, early_exit=EarlyExit("lossless", 0.0, num_draft_tokens=3))
    drafted = 0
    for outputs in steps(open_engine(), log, params):
        assert len(log.waits) <= bool(outputs) + 2 * 3, log.waits
        drafted += sum(output.num_draft_tokens for output in outputs)
    assert drafted


@pytest.mark.parametrize("student", [True, False], ids=["student", "dense"])
def test_drafts_from_the_text_cost_no_wait(student: bool, log: DeviceLog) -> None:
    params = replace(GREEDY, max_tokens=9, num_lookup_tokens=4)
    drafted = 0
    for outputs in steps(open_engine(student=student), log, params):
        assert len(log.waits) == bool(outputs), log.waits
        assert log.copies == 1
        drafted += sum(output.num_draft_tokens for output in outputs)
    assert drafted


class Group:
    """Stand-in for NCCL's process group, which needs GPUs: sums and broadcasts leave each rank's tensor as it is."""

    def __init__(self, *_: Any) -> None:
        self.Options = SimpleNamespace

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        assert all(tensor.device == DEVICE and tensor.is_contiguous() for tensor in tensors)
        return SimpleNamespace(wait=lambda: None)

    def broadcast(self, tensor: torch.Tensor, _rank: int) -> Any:
        return self.allreduce([tensor])


def rank_of(number: int) -> ranks.TensorParallelGroup:
    with (
        patch.object(ranks._c10d, "ProcessGroupNCCL", Group, create=True),
        patch.object(Group, "Options", SimpleNamespace, create=True),
        patch.object(ranks._c10d, "PrefixStore"),
    ):
        return ranks.TensorParallelGroup(None, number, 2, DEVICE)


@pytest.mark.parametrize(
    ("family", "drafting"), [("llama", 3), *(pytest.param(name, 0, marks=wide) for name in ("llama", "deepseek_v2"))]
)
def test_ranks_of_a_shared_model_wait_for_nothing_but_the_token(family: str, drafting: int, log: DeviceLog) -> None:
    config = EngineConfig(tensor_parallel_size=2, max_num_batched_tokens=32, kv_cache_bytes=1 << 26)
    parts = []
    for number in range(2):
        model = model_of(family, student=True)
        with torch.device(DEVICE):
            shard_model(model, rank_of(number))
        parts.append(LoadedModel(model.config, None, frozenset(), 256, prepare_model(model, config, DEVICE), "digest"))
    here, there = Pipe()
    leader = ranks.RankProcesses(rank_of(0), [here], [])
    with make_drafts_free():
        engine = LLMEngine(parts[0], config, leader)
    exits = EarlyExit("lossless", 0.0, num_draft_tokens=drafting) if drafting else EarlyExit("off")
    for outputs in steps(engine, log, replace(GREEDY, early_exit=exits)):
        assert len(log.waits) <= bool(outputs) + 2 * drafting, log.waits
    engine.close()  # ends what is sent to the other rank
    parts[1].model.set_attn_implementation("swiftkv_paged")
    log.clear()
    with torch.inference_mode():
        ranks.run_announced_passes(
            there, parts[1].model, lambda blocks: make_cache(parts[1], config, num_blocks=blocks), rank_of(1)
        )
    assert log.kernels
    assert not log.waits
