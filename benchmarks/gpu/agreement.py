"""Agreement of an engine with PyTorch: errors of its log-probabilities, relative to those of PyTorch in low precision.

The engine generates greedily, and a float32 forward pass of the reference implementation scores its tokens. The engine
agrees if the root mean square error of its log-probabilities is at most 1.3 times that of PyTorch's forward pass in the
engine's dtype, and if no chosen token is further below the best one than three times PyTorch's largest error.

`check_small_models` does so for steps in which FlashAttention 2 would divide the keys of a run, over small random
models. A large model's heads and runs fill a GPU, so its keys are not split, and its answers do not show whether parts
are combined correctly (pytorch/pytorch#194167). Two prompts of several blocks of keys are prefilled in one step and
decoded; then short prompts arrive and are prefilled in a step together with the decodes; finally all four decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import format_markdown_table
from benchmarks.gpu.models import SMALL_SHAPES, prepare_models, release_memory
from benchmarks.serving.loads import Request
from benchmarks.serving.systems import make_random_prompts
from swiftkv_platform.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams

MAX_RELATIVE_ERROR = 1.3
"""Max root mean square error, relative to PyTorch's."""
MAX_RELATIVE_GAP = 3.0
"""Max distance of a chosen token from the best one, relative to PyTorch's largest error."""
FLOAT32_TOLERANCE = 1e-4
"""Error in nats of another order of summation, in float32 and for models of this size."""


@dataclass(frozen=True)
class GreedyOutput:
    """Greedily generated tokens of one prompt, with the engine's log-probabilities in nats."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class TokenScores:
    """Scores of all generated tokens in one forward pass, each tensor [num_tokens], in nats."""

    chosen: torch.Tensor
    """Log-probability of each generated token."""
    best: torch.Tensor
    """Largest log-probability at each position."""


def generate_greedily(engine: LLMEngine, prompts: Sequence[list[int]], num_tokens: int) -> list[GreedyOutput]:
    return convert_outputs(engine.generate(prompts, make_greedy_params(num_tokens), progress=False))


def make_greedy_params(num_tokens: int) -> SamplingParams:
    """Return sampling parameters for `num_tokens` greedy tokens with log-probabilities."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


def convert_outputs(outputs: Sequence[RequestOutput]) -> list[GreedyOutput]:
    """Convert greedy outputs of our engine, which must have log-probabilities."""
    return [
        GreedyOutput(
            list(output.prompt_token_ids),
            output.token_ids,
            [row[token] for row, token in zip(output.logprobs or (), output.token_ids, strict=True)],
        )
        for output in outputs
    ]


def score_tokens(directory: Path, outputs: Sequence[GreedyOutput], dtype: torch.dtype, device: str) -> TokenScores:
    """Score with the reference implementation: transformers' classes, or this project's for a student."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    chosen, best = [], []
    with torch.no_grad():
        for output in outputs:
            token_ids = torch.tensor([output.prompt + output.token_ids], device=device)
            num_tokens = len(output.token_ids)
            logits = model(token_ids, logits_to_keep=num_tokens + 1).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            chosen.append(logprobs.gather(-1, token_ids[0, -num_tokens:, None])[:, 0].cpu())
            best.append(logprobs.amax(-1).cpu())
    return TokenScores(torch.cat(chosen), torch.cat(best))


def compare_with_pytorch(
    directory: Path, outputs: Sequence[GreedyOutput], dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Compare outputs that were generated in `dtype` with PyTorch, see `compare_scores`."""
    exact, same_dtype = (score_tokens(directory, outputs, each, device) for each in (torch.float32, dtype))
    return compare_scores(outputs, exact, same_dtype)


def compare_scores(outputs: Sequence[GreedyOutput], exact: TokenScores, same_dtype: TokenScores) -> dict[str, Any]:
    """Return the errors in nats, and whether the engine agrees.

    Args:
        exact: PyTorch's scores in float32.
        same_dtype: PyTorch's scores in the engine's dtype.
    """
    served = torch.tensor([logprob for output in outputs for logprob in output.logprobs])
    error, pytorch_error = _rms(served - exact.chosen), _rms(same_dtype.chosen - exact.chosen)
    gap, pytorch_most = float((exact.best - exact.chosen).max()), float((same_dtype.chosen - exact.chosen).abs().max())
    return {
        "num_tokens": len(served),
        "error": error,
        "pytorch_error": pytorch_error,
        "max_gap_to_best": gap,
        "agrees": error <= MAX_RELATIVE_ERROR * pytorch_error + FLOAT32_TOLERANCE
        and gap <= MAX_RELATIVE_GAP * pytorch_most + FLOAT32_TOLERANCE,
    }


def _rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())


def format_table(found: Mapping[str, dict[str, Any]]) -> str:
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
    return format_markdown_table(head, cells)


WAVE_PROMPT_LENGTHS = (700, 300), (40, 5)
"""Tokens of the prompts of each wave; a wave arrives together."""
STEPS_PER_WAVE = 4
NUM_TOKENS = 32


def check_small_models(directory: Path, dtype: torch.dtype, device: str) -> dict[str, dict[str, Any]]:
    """Compare each model of `SMALL_SHAPES` and its students with PyTorch; results by name.
    Models are saved in `directory`."""
    found = {}
    for shape in SMALL_SHAPES:
        models = prepare_models(shape, directory / shape, dtype=dtype, device=device, group_sizes=[1])
        for name, model in models.items():
            outputs = _generate_outputs(model, dtype, device)
            release_memory()
            found[f"{shape}, {name}"] = compare_with_pytorch(model, outputs, dtype, device)
    return found


def _generate_outputs(model: Path, dtype: torch.dtype, device: str) -> list[GreedyOutput]:
    config = EngineConfig(
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_num_batched_tokens=2048,
        kv_cache_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_pretrained(model, config)
    try:
        return _generate_in_waves(engine)
    finally:
        engine.close()


def _generate_in_waves(engine: LLMEngine) -> list[GreedyOutput]:
    vocab_size, finished = engine.model_config.vocab_size, list[RequestOutput]()
    for seed, lengths in enumerate(WAVE_PROMPT_LENGTHS):
        for prompt in make_random_prompts([Request(0.0, length, 1) for length in lengths], vocab_size, seed):
            engine.add_request(prompt, make_greedy_params(NUM_TOKENS))
        for _ in range(STEPS_PER_WAVE):
            engine.step()
    while engine.has_unfinished_requests:
        finished += [output for output in engine.step() if output.finished]
    return convert_outputs(finished)
