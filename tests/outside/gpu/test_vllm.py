"""The plugin in vLLM on a GPU: `make gpu VLLM_PYTHON=PATH`, an interpreter that has vLLM and the plugin.

In float32, with Triton attention and IEEE arithmetic, greedy text equals that of the project's own forward pass; in
bfloat16, with FlashAttention, log-probabilities are as close to it as PyTorch's. Heads have at least 32 dimensions, as
vLLM's GPU attention requires. On a GPU vLLM chooses its second model runner (V2); the first one is tested too.
"""

import os

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the tests look into the scheduler

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("this interpreter has no vLLM", allow_module_level=True)

from vllm import LLM, SamplingParams
from vllm.compilation import monitor
from vllm.exceptions import VLLMValidationError

from benchmarks.gpu.agreement import GreedyOutput, compare_with_pytorch
from swiftkv_platform.families import is_served_by_vllm
from tests.outside.gpu.device import needs_gpu
from tests.outside.vllm.engines import (
    KINDS,
    OWN,
    SHAPE,
    VOCAB,
    complete,
    expected,
    make_student,
    next_logprobs,
    prompts,
    recorded_sizes,
    serving,
)
from tests.outside.vllm.quantize import quantize
from tests.outside.vllm.test_connectors import BLOCK
from tests.outside.vllm.test_connectors import options as stored_in
from tests.outside.vllm.test_quantized import BATCH, error
from tests.support.tiny_models import FAMILY_CONFIGS, family_teacher

pytestmark = needs_gpu
HEAD_DIM = {"head_dim": 32}
EAGER: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 16,
}
GRAPHS = EAGER | {"enforce_eager": False, "max_num_batched_tokens": 64}
"""Compiled, with CUDA graphs: full ones for decode steps, piecewise ones for other steps."""
FORMS = KINDS | {"shared": SHAPE, "own": OWN}
EXPERTS = [name for name in FAMILY_CONFIGS if "moe" in name or name == "mixtral"]
SERVED = [name for name in FAMILY_CONFIGS if is_served_by_vllm(name.split("-")[0]) and name not in EXPERTS]
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow graph capture: the first runner forbids it in its process after its own, and the second never allows it."""
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", True)


@pytest.mark.parametrize("form", ["shared", "own", "chosen-tail"])
@pytest.mark.parametrize("name", SERVED)
def test_every_family(name: str, form: str, tmp_path: Path) -> None:
    make_student(tmp_path, name, shape=FORMS[form], **HEAD_DIM)
    batch = prompts()
    with serving(tmp_path, **EAGER) as llm:
        assert uses_second_runner(llm)
        assert complete(llm, batch) == expected(tmp_path, batch)


@pytest.fixture(params=["1", "0"], ids=["v2", "v1"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with each of vLLM's model runners."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", request.param)


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("form", FORMS)
def test_text_with_graphs(form: str, tmp_path: Path) -> None:
    """Chunks, mixed batches and whole prompts; a batch whose size has no graph is padded."""
    make_student(tmp_path, shape=FORMS[form], **HEAD_DIM)
    batch = prompts((100, 3, 41, 17, 5))
    with serving(tmp_path, **GRAPHS) as llm:
        assert complete(llm, batch) == expected(tmp_path, batch)
        assert complete(llm, batch[1:2]) == expected(tmp_path, batch[1:2])


def test_teacher_mode(tmp_path: Path) -> None:
    make_student(tmp_path, **HEAD_DIM)
    batch = prompts((70, 9))
    with serving(tmp_path, hf_overrides={"swiftkv": False}, **GRAPHS) as llm:
        assert complete(llm, batch) == expected(tmp_path, batch, swiftkv=False)


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("caches", [False, True], ids=["", "prefixes"])
@pytest.mark.parametrize("form", FORMS)
def test_preemption_with_graphs(form: str, caches: bool, tmp_path: Path) -> None:
    make_student(tmp_path, shape=FORMS[form], **HEAD_DIM)
    batch = prompts((60, 62, 58, 61))
    options = GRAPHS | {"num_gpu_blocks_override": 20, "enable_prefix_caching": caches}
    with serving(tmp_path, **options) as llm, counted_preemptions(llm) as preempted:
        assert complete(llm, batch, LONG) == expected(tmp_path, batch, count=40)
    assert preempted


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("form", FORMS)
def test_cached_prefixes_with_graphs(form: str, tmp_path: Path) -> None:
    make_student(tmp_path, shape=FORMS[form], **HEAD_DIM)
    prefix, *endings = prompts((130, 4, 9))
    batch = [prefix + ending for ending in endings]
    texts = expected(tmp_path, batch)
    with serving(tmp_path, enable_prefix_caching=True, **GRAPHS) as llm:
        assert complete(llm, batch[:1]) == texts[:1]
        assert complete(llm, batch[1:]) == texts[1:]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize("form", FORMS)
def test_drafts_with_graphs(form: str, tmp_path: Path) -> None:
    make_student(tmp_path, shape=FORMS[form], **HEAD_DIM)
    batch = [prompts((6,))[0] * 8, *prompts((30,))]
    with serving(tmp_path, speculative_config=NGRAM, **GRAPHS) as llm:
        assert complete(llm, batch) == expected(tmp_path, batch)


def test_prompt_logprobs_are_refused(tmp_path: Path) -> None:
    make_student(tmp_path, shape=OWN, **HEAD_DIM)
    with serving(tmp_path, **EAGER) as llm, pytest.raises(VLLMValidationError, match="prompt_logprobs is 1"):
        complete(llm, prompts((5,)), SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("form", FORMS)
def test_agreement_in_bfloat16(form: str, graphs: bool, tmp_path: Path) -> None:
    """With FlashAttention, as on any GPU that supports it."""
    make_student(tmp_path, shape=FORMS[form], head_dim=64)
    batch = prompts((100, 3, 41, 17, 5))
    options = EAGER | {"attention_backend": "FLASH_ATTN", "dtype": "bfloat16", "enforce_eager": not graphs}
    with serving(tmp_path, **options) as llm:
        answers = answered(llm, batch)
    found = compare_with_pytorch(tmp_path, answers, torch.bfloat16, "cuda")
    assert found["agrees"], found


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("form", ["shared", "own"])
def test_experts_in_bfloat16(name: str, form: str, tmp_path: Path) -> None:
    """By vLLM's own kernels for routed experts."""
    make_student(tmp_path, name, shape=FORMS[form], head_dim=64)
    batch = prompts((100, 3, 41, 17, 5))
    with serving(tmp_path, **EAGER | {"attention_backend": "FLASH_ATTN", "dtype": "bfloat16"}) as llm:
        answers = answered(llm, batch)
    found = compare_with_pytorch(tmp_path, answers, torch.bfloat16, "cuda")
    assert found["agrees"], found


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("form", ["shared", "own", "chosen"])
def test_text_from_a_stored_cache(form: str, graphs: bool, tmp_path: Path) -> None:
    """The second engine reads the caches that the first one stored."""
    make_student(tmp_path / "student", shape=FORMS[form], **HEAD_DIM)
    batch = prompts((70, 41, 100))
    wanted = expected(tmp_path / "student", batch)
    engine = (GRAPHS if graphs else EAGER) | stored_in(tmp_path / "stored") | {"max_num_batched_tokens": 256}
    computed = []
    for _ in range(2):
        with serving(tmp_path / "student", **engine) as llm, recorded_sizes(llm) as sizes:
            assert complete(llm, batch) == wanted
            computed.append(sizes[0][0])
    needed = [sum(map(len, batch)), sum(len(ids) - (len(ids) - 2) // BLOCK * BLOCK for ids in batch)]
    assert computed == needed or graphs  # graphs pad the number of tokens
    assert computed[1] < needed[0]


BFLOAT16 = EAGER | {"attention_backend": "FLASH_ATTN", "dtype": "bfloat16", "max_logprobs": VOCAB}
BFLOAT16 |= {"enable_prefix_caching": False}  # each prompt is answered three times
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
"""A shape that GPU kernels for 4-bit weights take."""


def as_near_as_dense(tmp_path: Path, form: Callable[[Path], tuple[Path, dict[str, Any]]]) -> None:
    """Check that `form`, which gives the checkpoint and options to serve a model's quantised form, moves a student's
    log-probabilities no further than those of vLLM's own Llama, also with CUDA graphs, and that prompts skip layers.
    Decode steps run with graphs, and their text is not compared."""
    family_teacher("llama", **WIDE).save_pretrained(tmp_path / "dense")
    directory, options = form(tmp_path / "dense")
    with serving(directory, **options) as llm:
        of_dense = error(next_logprobs(llm, BATCH), tmp_path / "dense")
    for name, shape in FORMS.items():
        make_student(tmp_path / name, shape=shape, **WIDE)
        directory, options = form(tmp_path / name)
        with serving(directory, **options) as llm:
            of_student = error(next_logprobs(llm, BATCH), tmp_path / name)
            with recorded_sizes(llm) as sizes:
                complete(llm, BATCH[:3])
        assert 0 < of_student <= 1.2 * of_dense, name
        num_deep = sum(min(len(ids), shape.get("deep_tail", 1)) for ids in BATCH[:3])
        assert sizes[0] == (sum(map(len, BATCH[:3])), num_deep), "only a prompt's deep tokens enter the upper half"
        with serving(directory, **options | {"enforce_eager": False}) as llm:
            assert error(next_logprobs(llm, BATCH), tmp_path / name) <= 1.2 * of_dense, f"{name}, with CUDA graphs"
            complete(llm, BATCH[:3])


def test_fp8_weights(tmp_path: Path) -> None:
    """vLLM quantises any checkpoint while it loads."""
    as_near_as_dense(tmp_path, lambda directory: (directory, BFLOAT16 | {"quantization": "fp8"}))


@pytest.mark.parametrize("weights", ["int8", "int4", "gptq", "awq", "fp8-rows", "fp8"])
def test_quantised_checkpoints(weights: str, tmp_path: Path) -> None:
    def form(directory: Path) -> tuple[Path, dict[str, Any]]:
        return quantize(directory, directory.with_name(f"{directory.name}-{weights}"), weights)[0], BFLOAT16

    as_near_as_dense(tmp_path, form)


def test_fp8_cache(tmp_path: Path) -> None:
    as_near_as_dense(tmp_path, lambda directory: (directory, BFLOAT16 | {"kv_cache_dtype": "fp8"}))


def answered(llm: LLM, batch: list[list[int]]) -> list[GreedyOutput]:
    """Return greedy answers of 24 tokens with their log-probabilities."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
    answers = []
    for ids, output in zip(batch, outputs, strict=True):
        (one,) = output.outputs
        logprobs = [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)]
        answers.append(GreedyOutput(ids, list(one.token_ids), logprobs))
    return answers


def uses_second_runner(llm: LLM) -> bool:
    """Whether vLLM chose its second model runner (V2)."""
    used: bool = llm.llm_engine.vllm_config.use_v2_model_runner
    return used


@contextmanager
def counted_preemptions(llm: LLM) -> Iterator[list[str]]:
    """Record the ids of the requests that are preempted in the block."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    preempt, seen = scheduler._preempt_request, []

    def count(request: Any, *arguments: Any, **options: Any) -> None:
        seen.append(request.request_id)
        preempt(request, *arguments, **options)

    scheduler._preempt_request = count
    yield seen
