"""Agreement of an engine with PyTorch: errors of its log-probabilities, compared with those of PyTorch in low
precision.

The engine answers greedily, and a float32 forward pass of the reference implementation scores its tokens. The engine
agrees if the root mean square error of its log-probabilities is at most 1.3 times that of PyTorch's forward pass in the
engine's dtype, and if no chosen token is further below the best one than three times PyTorch's largest error.

`agreements` does so for steps in which FlashAttention 2 would divide the keys of a run, over small random models. A
large model's heads and runs fill a GPU, so its keys are not split, and its answers do not show whether parts are
combined correctly (pytorch/pytorch#194167). Two prompts of several blocks of keys are prefilled in one step and
decoded; then short prompts arrive and are prefilled in a step together with the decodes; finally all four decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import markdown
from benchmarks.gpu.models import SMALL, prepare, release_memory
from benchmarks.serving.loads import Request
from benchmarks.serving.systems import random_prompts
from swiftkv_platform.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams

MOST_OF_PYTORCH = 1.3
"""Largest accepted root mean square error, relative to PyTorch's."""
MOST_GAP = 3.0
"""Distance of a chosen token from the best one, in units of PyTorch's largest error."""
FLOAT32_ERROR = 1e-4
"""Error in nats due to another order of summation, in float32 and for models of this size."""


@dataclass(frozen=True)
class Answer:
    """Tokens that an engine chose greedily, with its own log-probabilities in nats."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Scores:
    """A forward pass over the tokens of all answers, each tensor [num_tokens], in nats."""

    chosen: torch.Tensor
    """Log-probability of each token of the answers."""
    best: torch.Tensor
    """Largest log-probability at each position."""


def engine_answers(engine: LLMEngine, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
    """Answers of our own engine."""
    return answers_of(engine.generate(prompts, greedy(num_tokens), progress=False))


def greedy(num_tokens: int) -> SamplingParams:
    """Parameters of an answer of `num_tokens` tokens with their log-probabilities."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


def answers_of(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """Convert greedy outputs of our own engine, which must include log-probabilities."""
    return [
        Answer(
            list(output.prompt_token_ids),
            output.token_ids,
            [row[token] for row, token in zip(output.logprobs or (), output.token_ids, strict=True)],
        )
        for output in outputs
    ]


def score(directory: Path, answers: Sequence[Answer], dtype: torch.dtype, device: str) -> Scores:
    """Scores by the reference implementation: transformers' own classes, or this project's for a student."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    chosen, best = [], []
    with torch.no_grad():
        for answer in answers:
            token_ids = torch.tensor([answer.prompt + answer.token_ids], device=device)
            num_tokens = len(answer.token_ids)
            logits = model(token_ids, logits_to_keep=num_tokens + 1).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            chosen.append(logprobs.gather(-1, token_ids[0, -num_tokens:, None])[:, 0].cpu())
            best.append(logprobs.amax(-1).cpu())
    return Scores(torch.cat(chosen), torch.cat(best))


def judge(directory: Path, answers: Sequence[Answer], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Comparison of answers that were computed in `dtype` with PyTorch; see `compare`."""
    exact, own = (score(directory, answers, each, device) for each in (torch.float32, dtype))
    return compare(answers, exact, own)


def compare(answers: Sequence[Answer], exact: Scores, own: Scores) -> dict[str, Any]:
    """Errors in nats, and whether they are small enough.

    Args:
        exact: scores in float32.
        own: PyTorch's scores in the engine's dtype.
    """
    served = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    error, pytorch_error = _rms(served - exact.chosen), _rms(own.chosen - exact.chosen)
    gap, pytorch_most = float((exact.best - exact.chosen).max()), float((own.chosen - exact.chosen).abs().max())
    return {
        "num_tokens": len(served),
        "error": error,
        "pytorch_error": pytorch_error,
        "max_gap_to_best": gap,
        "agrees": error <= MOST_OF_PYTORCH * pytorch_error + FLOAT32_ERROR
        and gap <= MOST_GAP * pytorch_most + FLOAT32_ERROR,
    }


def _rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())


def table(found: Mapping[str, dict[str, Any]]) -> str:
    """A line for each model."""
    head = ["model", "tokens", "RMS error (nats)", "PyTorch's", "gap to the best", "agrees"]
    cells = (
        [
            model,
            str(row["num_tokens"]),
            *(f"{row[name]:.4f}" for name in ("error", "pytorch_error", "max_gap_to_best")),
            "yes" if row["agrees"] else "NO",
        ]
        for model, row in found.items()
    )
    return markdown(head, cells)


WAVES = (700, 300), (40, 5)
"""Tokens of the prompts that arrive together."""
STEPS_BETWEEN = 4
NUM_TOKENS = 32


def agreements(directory: Path, dtype: torch.dtype, device: str) -> dict[str, dict[str, Any]]:
    """Compare each model of `SMALL` and its students with PyTorch; results by name. Models are saved in `directory`."""
    found = {}
    for shape in SMALL:
        models = prepare(shape, directory / shape, dtype=dtype, device=device, group_sizes=[1])
        for name, model in models.items():
            answers = _answers(model, dtype, device)
            release_memory()
            found[f"{shape}, {name}"] = judge(model, answers, dtype, device)
    return found


def _answers(model: Path, dtype: torch.dtype, device: str) -> list[Answer]:
    config = EngineConfig(
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_num_batched_tokens=2048,
        kv_cache_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_pretrained(model, config)
    try:
        return _answers_in_waves(engine)
    finally:
        engine.close()


def _answers_in_waves(engine: LLMEngine) -> list[Answer]:
    vocab_size, finished = engine.model_config.vocab_size, list[RequestOutput]()
    for seed, lengths in enumerate(WAVES):
        for prompt in random_prompts([Request(0.0, length, 1) for length in lengths], vocab_size, seed):
            engine.add_request(prompt, greedy(NUM_TOKENS))
        for _ in range(STEPS_BETWEEN):
            engine.step()
    while engine.has_unfinished_requests:
        finished += [output for output in engine.step() if output.finished]
    return answers_of(finished)
