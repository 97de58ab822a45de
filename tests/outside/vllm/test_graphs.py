"""Shapes of CUDA graphs, from vLLM's own dispatcher, passed to the builder of a student's metadata as in capture."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from packaging import version
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_kv_sharing_fast_prefill_common_attn_metadata
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from swiftkv_platform.vllm.checks import _disable_full_graphs

SIZES = [1, 2, 4, 8, 16, 32, 64]
"""Numbers of tokens that graphs are captured for."""
MAX_NUM_SEQS = 16


def configured(num_drafts: int, mode: str | None) -> Any:
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
        speculative_config={"num_speculative_tokens": num_drafts} if num_drafts else None,
        num_speculative_tokens=num_drafts,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS),
    )


def captured(config: Any) -> Iterator[CommonAttentionMetadata]:
    """Yield the metadata of each full graph; like capture, without the indices of logits."""
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, dispatcher.uniform_decode_query_len)
    for mode, shapes in dispatcher.get_capture_descs():
        for shape in shapes if mode == CUDAGraphMode.FULL else ():
            length = dispatcher.uniform_decode_query_len if shape.uniform else shape.num_tokens
            starts = torch.arange(shape.num_reqs + 1, dtype=torch.int32) * length
            lengths = torch.full((shape.num_reqs,), 64, dtype=torch.int32)
            yield CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=shape.num_reqs,
                num_actual_tokens=shape.num_tokens,
                max_query_len=length,
                max_seq_len=64,
                block_table_tensor=torch.zeros(shape.num_reqs, 4, dtype=torch.int32),
                slot_mapping=torch.zeros(shape.num_tokens, dtype=torch.int64),
            )


def kept_whole(metadata: CommonAttentionMetadata) -> bool:
    """Whether the builder keeps every token of a graph. AssertionError: vLLM 0.29 cannot."""
    return make_kv_sharing_fast_prefill_common_attn_metadata(metadata) is metadata


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("mode", [None, "PIECEWISE", "NONE"])
def test_every_shape_that_is_captured_is_built(num_drafts: int, mode: str | None) -> None:
    config = configured(num_drafts, mode)
    _disable_full_graphs(config)
    if config.compilation_config.cudagraph_mode is None:  # vLLM's default for a compiled model
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    shapes = list(captured(config))
    assert bool(shapes) == (not num_drafts and mode is None), "only decode steps without drafts have full graphs"
    assert {metadata.max_query_len for metadata in shapes} <= {1}
    assert all(map(kept_whole, shapes))


def test_whole_graphs_beside_drafts_are_what_the_builder_cannot_divide() -> None:
    """Steps of 1 + k tokens, whose graphs are refused: vLLM 0.29 asserts; later versions run all tokens in the upper
    half."""
    shapes = list(captured(configured(3, "FULL_AND_PIECEWISE")))
    assert {metadata.max_query_len for metadata in shapes} == {4}
    if version.parse(vllm.__version__) < version.parse("0.30"):
        for metadata in shapes:
            with pytest.raises(AssertionError):
                kept_whole(metadata)
    elif version.parse(vllm.__version__) >= version.parse("0.31"):
        assert all(map(kept_whole, shapes))
