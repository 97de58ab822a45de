"""Rows that run layers >= l: in the shapes of CUDA graphs, from vLLM's own dispatcher, and in other steps."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from swiftkv_platform.errors import ModelError
from swiftkv_platform.vllm.deep_tokens import NO_ROWS, RowSelector

SIZES = [1, 2, 4, 8, 16, 32, 64]
"""Numbers of tokens that graphs are captured for."""
MAX_NUM_SEQS = 16


def configured(num_drafts: int, mode: str) -> Any:
    """Return a GPU configuration with the fields that the plugin and vLLM's dispatcher read."""
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=SIZES,
        max_cudagraph_capture_size=SIZES[-1],
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    return SimpleNamespace(
        compilation_config=compilation,
        speculative_config=SimpleNamespace(num_speculative_tokens=num_drafts) if num_drafts else None,
        num_speculative_tokens=num_drafts,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=128),
    )


def captured(config: Any) -> Iterator[CommonAttentionMetadata]:
    """Yield the metadata of each full graph."""
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, dispatcher.uniform_decode_query_len)
    for mode, shapes in dispatcher.get_capture_descs():
        for shape in shapes if mode == CUDAGraphMode.FULL else ():
            length = dispatcher.uniform_decode_query_len if shape.uniform else shape.num_tokens
            starts = [length * i for i in range(shape.num_reqs + 1)]
            yield make_step(starts, [64] * shape.num_reqs, None)


def make_step(starts: list[int], lengths: list[int], is_prefilling: list[bool] | None) -> CommonAttentionMetadata:
    """Return the metadata of a step by the first token of each request and the lengths of requests after it."""
    bounds, num_reqs = torch.tensor(starts, dtype=torch.int32), len(lengths)
    return CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        num_reqs=num_reqs,
        num_actual_tokens=starts[-1],
        max_query_len=int(bounds.diff().max()),
        max_seq_len=max(lengths),
        block_table_tensor=torch.zeros(num_reqs, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        is_prefilling=None if is_prefilling is None else torch.tensor(is_prefilling),
    )


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("reads_prompts", [False, True])
def test_every_row_of_a_full_graph_runs_all_layers(num_drafts: int, mode: str, reads_prompts: bool) -> None:
    """At capture, and when chunks of prompts have the size of a decode step."""
    config = configured(num_drafts, mode)
    selector = RowSelector(config, 16, torch.device("cpu"))
    shapes = list(captured(config))
    assert bool(shapes) == mode.startswith("FULL"), "graphs of decode steps only"
    assert {step.max_query_len for step in shapes} <= {1 + num_drafts}
    for step in shapes:
        step.is_prefilling = torch.full((step.num_reqs,), reads_prompts)
        selector.prompt_lengths = [64] * step.num_reqs
        assert selector.select_rows(step) == (step, None)


@pytest.mark.parametrize(("end", "num_rows"), [(24, 0), (25, 0), (26, 2), (30, 6)])
@pytest.mark.parametrize("deep_tail", [5, None])
def test_layers_above_l_run_only_if_a_token_is_deep(deep_tail: int | None, end: int, num_rows: int) -> None:
    """Two prompts go on, one of which may reach its tail, or its last token if none is deep."""
    selector = RowSelector(configured(0, "NONE"), deep_tail, torch.device("cpu"))
    selector.prompt_lengths = [30 if deep_tail else 26, 40]
    step = make_step([0, 10, 20], [end, 20], [True, True])
    selected, rows = selector.select_rows(step)
    assert rows is not None
    if num_rows == 0:
        assert (selected, rows) == (step, NO_ROWS)
    else:
        assert rows.num_rows == selected.num_actual_tokens == (num_rows if deep_tail else 2)


def test_rows_of_prompts_of_unknown_length() -> None:
    """With drafts in runner V1, where no token keeps own K and V: each chunk may end its prompt."""
    selector = RowSelector(configured(0, "NONE"), None, torch.device("cpu"))
    _, rows = selector.select_rows(make_step([0, 10, 20], [24, 20], [True, True]))
    assert rows is not None
    assert rows.tokens.tolist() == [9, 19]


def test_own_keys_and_values_need_the_lengths_of_prompts() -> None:
    """A vLLM that no longer calls the plugin's hook would write wrong text."""
    selector = RowSelector(configured(0, "NONE"), 1, torch.device("cpu"))
    selector.select_rows(make_step([0, 1, 2], [24, 20], [False, False]))
    with pytest.raises(ModelError, match="has not reported where prompts end"):
        selector.select_rows(make_step([0, 1, 2], [24, 20], [False, True]))


@pytest.mark.parametrize(("mode", "size"), [("FULL_AND_PIECEWISE", 8), ("PIECEWISE", 8), ("FULL_DECODE_ONLY", 7)])
def test_rows_are_padded_to_a_piecewise_graph(mode: str, size: int) -> None:
    """Of a decode step and two prompts, one of which goes on."""
    selector = RowSelector(configured(0, mode), 5, torch.device("cpu"))
    selector.prompt_lengths = [20, 30, 40]
    step = make_step([0, 1, 11, 21], [50, 30, 20], [False, True, True])
    selected, rows = selector.select_rows(step)
    assert rows is not None
    assert rows.tokens.tolist() == [0, 6, 7, 8, 9, 10, 20, 20][:size]
    assert rows.num_rows == selected.num_actual_tokens == 7
    assert (selected.query_start_loc.tolist(), selected.max_query_len) == ([0, 1, 6, 7], 5)
    assert selector.first_deep[:7].tolist() == [15, 25, 25, 25, 25, 25, 35]
    assert (selector.first_deep[7:size] > 1 << 40).all(), "padding is never deep"
