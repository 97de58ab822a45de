"""Text does not depend on vLLM's scheduling or sharding: chunks, cached prefixes, preemption, drafts, ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import vllm
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.import_utils import has_arctic_inference
from vllm.v1.engine.async_llm import AsyncLLM

from tests.outside.vllm.engines import (
    CHOSEN,
    DEFAULTS,
    GREEDY,
    OWN,
    SHAPE,
    complete,
    expected,
    make_student,
    prompts,
    recorded_sizes,
    serving,
)
from tests.outside.vllm.interpreted import SECOND_RUNNER
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.parameters import pairwise

in_this_process = pytest.mark.skipif(SECOND_RUNNER, reason="vLLM's own processes do not have Triton's interpreter")
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)


def test_chunked_prefill_and_mixed_batches(skipping: Path) -> None:
    batch = prompts((100, 5, 61, 33))
    with serving(skipping, max_num_batched_tokens=32, max_num_seqs=4) as llm, recorded_sizes(llm) as sizes:
        assert complete(llm, batch) == expected(skipping, batch)
    assert any(1 < upper < lower for lower, upper in sizes), "a step has a prompt's chunk and decoded tokens"
    assert any(upper == 0 for _, upper in sizes), "a step ends no prompt"
    assert max(lower for lower, _ in sizes) <= 32


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_token_of_a_chunk_is_not_deep(size: int, own: Path) -> None:
    """With chunks of one token, rows that read a prompt look like rows that decode."""
    batch = prompts((9, 3))
    with serving(own, long_prefill_token_threshold=size) as llm, recorded_sizes(llm) as sizes:
        assert complete(llm, batch) == expected(own, batch)
    assert sizes[0] == (2 * size, 2 if size == 1 else 0)


def test_prompts_that_arrive_while_others_decode(skipping: Path) -> None:
    batch = prompts((40, 90, 7))
    finished: dict[str, list[int]] = {}
    with serving(skipping) as llm:
        engine, waiting = llm.llm_engine, list(enumerate(batch))
        while waiting or engine.has_unfinished_requests():
            if waiting:  # one request per step
                i, ids = waiting.pop(0)
                engine.add_request(str(i), {"prompt_token_ids": ids}, GREEDY)
            for output in engine.step():
                if output.finished:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
    assert [finished[str(i)] for i in range(len(batch))] == expected(skipping, batch)


def test_cached_prefixes(skipping: Path) -> None:
    prefix, *endings = prompts((130, 4, 9))
    batch = [prefix + ending for ending in endings]
    texts = expected(skipping, batch)
    with serving(skipping, block_size=32, enable_prefix_caching=True) as llm, recorded_sizes(llm) as sizes:
        assert complete(llm, batch[:1]) == texts[:1]
        sizes.clear()
        (output,) = llm.generate([{"prompt_token_ids": batch[1]}], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == texts[1]
    num_deep = AutoConfig.from_pretrained(skipping).swiftkv_deep_tail
    # blocks that hold a deep token of either prompt are not shared
    num_cached = (len(batch[0]) - num_deep) // 32 * 32
    assert output.num_cached_tokens == num_cached
    assert sizes[0] == (len(batch[1]) - num_cached, num_deep)


@pytest.mark.parametrize("waits", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("caches", [False, True], ids=["", "prefixes"])
def test_preemption(caches: bool, waits: bool, skipping: Path) -> None:
    batch = prompts((60, 62, 58, 61))
    texts = expected(skipping, batch, count=40)
    # Each prompt takes 2 blocks, and a third for its answer: not all four fit.
    options = {"block_size": 32, "num_gpu_blocks_override": 10, "enable_prefix_caching": caches}
    with serving(skipping, async_scheduling=not waits, **options) as llm, recorded_sizes(llm) as sizes:
        assert complete(llm, batch, LONG) == texts
    assert any(lower > upper for lower, upper in sizes[1:]), "preempted requests are recomputed"


def test_answers_that_keep_their_own_are_read_as_prompts(own: Path) -> None:
    """No request reuses cached tokens that another generated. Prompts are reused, except for the block of the last
    token, which is deep."""
    first, more = prompts((64, 20))
    (answer,) = expected(own, [first], count=40)
    turn = first + answer[:34] + more
    turns = [first, turn, turn, first, first + answer[:1]]
    with serving(own, block_size=32, enable_prefix_caching=True) as llm:
        engine, outputs = llm.llm_engine, []
        engine.add_request("0", {"prompt_token_ids": turns[0]}, LONG)
        for _ in range(36):
            engine.step()
        engine.add_request("1", {"prompt_token_ids": turns[1]}, LONG)
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
        outputs += [llm.generate([{"prompt_token_ids": ids}], LONG, use_tqdm=False)[0] for ids in turns[2:]]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected(own, turns, count=40)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 96, 32, 64]


@in_this_process
def test_a_streamed_prompt_is_read_from_its_beginning(own: Path) -> None:
    """Tokens generated between the parts of a prompt, except for the last, become prompt tokens."""
    first, more = prompts((40, 9))

    async def written() -> list[int]:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(own), block_size=32, **DEFAULTS))
        answered, tokens = asyncio.Event(), []

        async def parts() -> AsyncGenerator[StreamingInput, None]:
            yield StreamingInput(prompt={"prompt_token_ids": list(first)})
            await answered.wait()
            yield StreamingInput(prompt={"prompt_token_ids": list(more)})

        params = GREEDY.clone()
        params.output_kind = RequestOutputKind.DELTA
        try:
            async for output in llm.generate(parts(), params, "streamed"):
                tokens += output.outputs[0].token_ids
                if len(tokens) == GREEDY.max_tokens:
                    answered.set()
        finally:
            llm.shutdown()
        return tokens

    (answer,) = expected(own, [first])
    assert asyncio.run(written()) == answer + expected(own, [first + answer[:-1] + more])[0]


def test_structured_outputs(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).symlink_to(file)
    byte_tokenizer().save_pretrained(tmp_path)
    choice = StructuredOutputsParams(choice=["left", "right"])
    params = SamplingParams(max_tokens=8, temperature=0.0, structured_outputs=choice)
    with serving(tmp_path, skip_tokenizer_init=False) as llm:
        outputs = llm.generate(["turn", "which way is it"], params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} <= {"left", "right"}


@in_this_process
@pytest.mark.parametrize(
    ("name", "num_key_value_heads", "shape"),
    pairwise(["qwen3", "olmo2"], [2, 1], [SHAPE, OWN, CHOSEN | {"deep_tail": 16}], soak=False),
)
def test_two_ranks(name: str, num_key_value_heads: int, shape: dict[str, Any], tmp_path: Path) -> None:
    """Sharded key-value heads, and one head that both ranks hold."""
    make_student(tmp_path, name, shape=shape, num_key_value_heads=num_key_value_heads)
    batch = prompts()
    with serving(tmp_path, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert complete(llm, batch) == expected(tmp_path, batch)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
BY_BATCH_SIZE = NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 0], [3, 3, 1]]}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
needs_arctic = pytest.mark.skipif(not has_arctic_inference(), reason="arctic-inference is not installed")


@pytest.mark.skipif(not SECOND_RUNNER, reason="the first runner does not report where prompts end beside drafts")
@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("speculative", [NGRAM, BY_BATCH_SIZE], ids=["ngram", "by-batch-size"])
def test_drafts_of_deep_tokens(speculative: dict[str, Any], size: int, skipping: Path) -> None:
    """Chunks and prompts with several deep tokens look like drafts to be verified."""
    pattern = prompts((6,))[0]
    batch = [pattern * 8, *prompts((30, 5))]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)
    options = {"speculative_config": speculative, "max_num_batched_tokens": size, "max_num_seqs": 3}
    with serving(skipping, **options) as llm, recorded_sizes(llm) as sizes:
        assert complete(llm, batch, params) == expected(skipping, batch, count=40)
    num_decoded = sum(lower for lower, _ in sizes) - sum(map(len, batch))
    assert sum(lower == upper for lower, upper in sizes) < 39, "some drafts are accepted"
    assert num_decoded > 3 * 39, "some drafts are rejected"


@pytest.mark.xfail(
    vllm.__version__.startswith("0.32.") and not SECOND_RUNNER,
    raises=AttributeError,
    strict=False,
    reason="vLLM 0.32's CPU build cannot start an engine in a process that has imported numba, as n-gram drafts do",
)
@pytest.mark.parametrize(
    ("speculative", "options"),
    [(NGRAM, {}), (NGRAM, {"kv_cache_dtype": "fp8"}), pytest.param(SUFFIX, {}, marks=needs_arctic)],
    ids=["ngram", "ngram-fp8", "suffix"],
)
def test_speculation(speculative: dict[str, Any], options: dict[str, Any], llama: Path) -> None:
    """Drafts run through all layers, prompts do not, and the text is that without drafts."""
    pattern = prompts((6,))[0]
    batch = [pattern * 8, *prompts((30,))]
    with serving(llama, **options) as llm:
        plain = complete(llm, batch)
    with serving(llama, speculative_config=speculative, **options) as llm, recorded_sizes(llm) as sizes:
        drafted = complete(llm, batch)
    assert drafted == plain
    if "kv_cache_dtype" not in options:
        assert plain == expected(llama, batch)
    assert sizes[0][0] > sizes[0][1], "prompt tokens skip the upper half"
    assert any(lower == upper > len(batch) for lower, upper in sizes), "drafts run through all layers"
