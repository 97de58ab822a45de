"""The plugin in vLLM on a GPU: `make gpu VLLM_PYTHON=PATH`, an interpreter that has vLLM and the plugin.

In float32, with Triton attention and IEEE arithmetic, greedy text equals that of the project's own forward pass; in
bfloat16, with FlashAttention, log-probabilities are as close to it as PyTorch's. Heads have at least 32 dimensions, as
vLLM's GPU attention requires. On a GPU vLLM chooses its second model runner (V2); the first one is tested too.
"""

import os

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the tests look into the scheduler

from collections.abc import Iterator
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

from benchmarks.gpu.agreement import Answer, judge
from swiftkv_platform.families import is_served_by_vllm
from tests.gpu.device import needs_gpu
from tests.outside.vllm.engines import (
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
from tests.outside.vllm.test_quantized import BATCH, error
from tests.tiny_models import FAMILY_CONFIGS, family_teacher

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
FORMS = {"shared": SHAPE, "own": OWN, "own-g1": OWN | {"key_value_group_size": 1}}
SERVED = [
    name for name in FAMILY_CONFIGS if is_served_by_vllm(name.split("-")[0]) and "moe" not in name and name != "mixtral"
]
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow graph capture: the first runner forbids it in its process after its own, and the second never allows it."""
    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", True)


@pytest.mark.parametrize("form", ["shared", "own"])
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
@pytest.mark.parametrize("form", ["shared", "own"])
def test_preemption_with_graphs(form: str, caches: bool, tmp_path: Path) -> None:
    make_student(tmp_path, shape=FORMS[form], **HEAD_DIM)
    batch = prompts((60, 62, 58, 61))
    options = GRAPHS | {"num_gpu_blocks_override": 20, "enable_prefix_caching": caches}
    with serving(tmp_path, **options) as llm, counted_preemptions(llm) as preempted:
        assert complete(llm, batch, LONG) == expected(tmp_path, batch, count=40)
    assert preempted


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("form", ["shared", "own"])
def test_cached_prefixes_with_graphs(form: str, tmp_path: Path) -> None:
    make_student(tmp_path, shape=FORMS[form], **HEAD_DIM)
    prefix, *endings = prompts((130, 4, 9))
    batch = [prefix + ending for ending in endings]
    texts = expected(tmp_path, batch)
    with serving(tmp_path, enable_prefix_caching=True, **GRAPHS) as llm:
        assert complete(llm, batch[:1]) == texts[:1]
        assert complete(llm, batch[1:]) == texts[1:]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_drafts_with_graphs(tmp_path: Path) -> None:
    make_student(tmp_path, **HEAD_DIM)
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
    found = judge(tmp_path, answers, torch.bfloat16, "cuda")
    assert found["agrees"], found


@pytest.fixture(params=["fp8", "int8"])
def weights(request: pytest.FixtureRequest) -> str:
    """FP8, to which vLLM quantises any checkpoint while loading, or W8A8 as compressed-tensors stores it."""
    form: str = request.param
    return form


def quantized(directory: Path, weights: str) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint with these weights, and the options that serve it with vLLM's own GPU kernels."""
    options = EAGER | {"attention_backend": "FLASH_ATTN", "dtype": "bfloat16", "max_logprobs": VOCAB}
    options |= {"enable_prefix_caching": False}  # each prompt is answered three times
    if weights == "fp8":
        return directory, options | {"quantization": "fp8"}
    return quantize(directory, directory.with_name(f"{directory.name}-{weights}"), weights)[0], options


def test_quantised_logits_are_as_near_as_a_dense_models(weights: str, tmp_path: Path) -> None:
    family_teacher("llama", head_dim=64).save_pretrained(tmp_path / "dense")
    directory, options = quantized(tmp_path / "dense", weights)
    with serving(directory, **options) as llm:
        of_dense = error(next_logprobs(llm, BATCH), tmp_path / "dense")
    for form, shape in FORMS.items():
        make_student(tmp_path / form, shape=shape, head_dim=64)
        directory, options = quantized(tmp_path / form, weights)
        with serving(directory, **options) as llm:
            of_student = error(next_logprobs(llm, BATCH), tmp_path / form)
            with recorded_sizes(llm) as sizes:
                text = complete(llm, BATCH[:3])
        assert 0 < of_student <= 1.2 * of_dense, form
        assert sizes[0] == (sum(map(len, BATCH[:3])), 3), "only a prompt's last token enters the upper half"
        with serving(directory, **options | {"enforce_eager": False}) as llm:
            alike = [one == other for one, other in zip(complete(llm, BATCH[:3]), text, strict=True)]
        assert sum(alike) >= 2, "in bfloat16 one answer may differ at a near tie"


def answered(llm: LLM, batch: list[list[int]]) -> list[Answer]:
    """Return greedy answers of 24 tokens with their log-probabilities."""
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
    answers = []
    for ids, output in zip(batch, outputs, strict=True):
        (one,) = output.outputs
        logprobs = [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)]
        answers.append(Answer(ids, list(one.token_ids), logprobs))
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
