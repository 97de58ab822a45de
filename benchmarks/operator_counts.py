"""Operators of a decode step on a GPU, by batch size: `python -m benchmarks.operator_counts`.

Each is a kernel that the host launches, and a small model's step takes as long as its launches. They are counted on
fake CUDA tensors (`tests/fakes/cuda.py`), so no GPU is needed and nothing is timed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.loading import LoadedModel, prepare
from swiftkv_platform.model.families import student_classes
from tests.fakes.cuda import DEVICE, DeviceLog, fake_cuda

BATCH_SIZES = (1, 8, 64)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, ignore_eos=True)


@dataclass(frozen=True)
class Counts:
    """One decode step."""

    kernels: Counter[str]
    """Operators that launch a kernel or a copy, by name."""
    copies: int
    """Copies from the host to the device."""
    waits: int
    """Times the host waits for the device."""


def make_engine(num_layers: int, batch_size: int) -> LLMEngine:
    """A student with weights that have no numbers; the upper half of its layers share KV in pairs."""
    teacher = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    classes = student_classes("llama")
    config = classes.config_from(teacher, num_key_value_layers=num_layers // 2, key_value_group_size=2)
    with torch.device(DEVICE):
        model = classes.causal_lm._from_config(config, dtype=torch.bfloat16).eval()
    settings = EngineConfig(max_num_seqs=batch_size, kv_cache_bytes=1 << 30)
    return LLMEngine(LoadedModel(model.config, None, frozenset(), 1024, prepare(model, settings), "counts"), settings)


def decode_step(log: DeviceLog, batch_size: int, *, num_layers: int, params: SamplingParams = GREEDY) -> Counts:
    """Count one step in which every one of `batch_size` sequences, of different lengths, gets a token."""
    engine = make_engine(num_layers, batch_size)
    for index in range(batch_size):
        engine.add_request([1] * (3 + index), params)
    for _ in range(2):  # the prompts, and a first decode
        engine.step()
    log.clear()
    outputs = engine.step()
    assert len(outputs) == batch_size, "the step is no decode of all sequences"
    return Counts(log.kernels, log.copies, len(log.waits))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sampled", action="store_true", help="draw tokens instead of taking the best")
    parser.add_argument("--by-name", action="store_true", help="list the operators too")
    given = parser.parse_args(arguments)
    print(f"{'batch':>5} {'operators':>9} {'copies':>6} {'waits':>5}")
    for batch_size in BATCH_SIZES:
        with fake_cuda() as log:
            params = SAMPLED if given.sampled else GREEDY
            counts = decode_step(log, batch_size, num_layers=given.layers, params=params)
        print(f"{batch_size:5} {counts.kernels.total():9} {counts.copies:6} {counts.waits:5}")
        for name, count in counts.kernels.most_common() if given.by_name else ():
            print(f"      {count:9} {name}")


if __name__ == "__main__":
    main()
