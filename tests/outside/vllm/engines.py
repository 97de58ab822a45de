"""Tiny random students, vLLM engines over them in this process on this CPU, and the text that they should give."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs

from swiftkv_platform.model import convert
from tests.support import reference
from tests.support.tiny_models import disturb, family_teacher

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "seed": 0,
}
VOCAB = 258
"""Vocabulary size of a tiny Llama."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)


SHAPE = {"num_key_value_layers": 2, "key_value_group_size": 2}
"""l and g for 5 layers: the last group has one layer."""
OWN = SHAPE | {"decode_key_value": "own"}
"""The same, with deep tokens that keep their own K and V."""
TAIL = OWN | {"deep_tail": 16}
"""The same, with 16 deep tokens at the end of a prompt."""
CHOSEN = {"prefill_layers": [0, 2], "key_value_group_size": 1, "decode_key_value": "own"}
"""A student whose prompts bypass layer 1."""
KINDS: dict[str, dict[str, Any]] = {
    "shared": SHAPE,
    "chosen": CHOSEN,
    "tail": TAIL,
    "chosen-tail": CHOSEN | {"deep_tail": 40},
}


def make_student(
    directory: Path, name: str = "llama", *, shape: dict[str, Any] = SHAPE, seed: int = 3, **changes: Any
) -> Path:
    """Save a student of `FAMILY_CONFIGS[name]` whose SwiftKV weights differ from its teacher's."""
    student = disturb(convert(family_teacher(name, seed, **changes), **shape))
    student.save_pretrained(directory)
    return directory


@contextmanager
def serving(directory: Path, **options: Any) -> Iterator[LLM]:
    """Run an engine, and clean up after it, so that the next one in this process starts afresh."""
    llm = None
    try:
        llm = LLM(model=str(directory), **(DEFAULTS | options))
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def configure(directory: Path, **options: Any) -> Any:
    """Return vLLM's configuration of an engine without starting it."""
    return EngineArgs(model=str(directory), **(DEFAULTS | options)).create_engine_config()


def prompts(lengths: Sequence[int] = (3, 70, 17, 41), vocab_size: int = 250, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def complete(llm: LLM, batch: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """Return the tokens generated after each prompt."""
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in batch], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def next_logprobs(llm: LLM, batch: Sequence[Sequence[int]], vocab_size: int = VOCAB) -> torch.Tensor:
    """Return log-probabilities after each prompt, [num_prompts, vocab_size]; the engine needs `max_logprobs`."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=vocab_size)
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in batch], params, use_tqdm=False)
    rows = [output.outputs[0].logprobs[0] for output in outputs]
    return torch.tensor([[row[token].logprob for token in range(vocab_size)] for row in rows])


def expected(
    directory: Path, batch: Sequence[Sequence[int]], *, swiftkv: bool = True, count: int = 12, **arguments: Any
) -> list[list[int]]:
    """Return the greedy tokens of the project's own `generate()`, one prompt at a time; for deep tokens that keep their
    own K and V, those of the second implementation."""
    model = AutoModelForCausalLM.from_pretrained(directory, swiftkv=swiftkv, **arguments)
    if swiftkv and model.config.layer_map.deep_leaders:
        state, inv_freq = model.state_dict(), reference.frequencies(model.model.rotary_emb)
        with torch.no_grad():
            return [reference.greedy(state, model.config, list(ids), inv_freq, count) for ids in batch]
    model.generation_config.eos_token_id = None
    completions = []
    for ids in batch:
        tokens = torch.tensor([ids])
        generated = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        completions.append(generated[0, len(ids) :].tolist())
    return completions


def runner(llm: LLM) -> Any:
    """Return the engine's model runner."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@contextmanager
def recorded_sizes(llm: LLM) -> Iterator[list[tuple[int, int]]]:
    """Record, for each following step, the number of tokens in the lower half and in the upper half."""
    decoder = runner(llm).model.model
    sizes: list[tuple[int, int]] = []
    forward, run_rows = decoder.forward, decoder._run_rows

    def count_lower(input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: Any) -> torch.Tensor:
        sizes.append((positions.shape[0], 0))
        return forward(input_ids, positions, inputs_embeds)

    def count_rows(part: Any, positions: torch.Tensor, x: torch.Tensor, *rows: Any) -> torch.Tensor:
        sizes[-1] = (sizes[-1][0], x.shape[0])
        return run_rows(part, positions, x, *rows)

    decoder.forward, decoder._run_rows = count_lower, count_rows
    try:
        yield sizes
    finally:
        del decoder.forward, decoder._run_rows
