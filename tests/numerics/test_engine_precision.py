"""Lower precision: KV in 8 bits, bfloat16 with reordered weights; close to float32 however it is batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model import convert
from tests.tiny_models import disturb, random_teacher

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module")
def student_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student")
    disturb(convert(random_teacher(), num_key_value_layers=3, key_value_group_size=2)).save_pretrained(directory)
    return directory


def serve(directory: Path, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    engine = LLMEngine.from_pretrained(directory, EngineConfig(kv_cache_bytes=1 << 20, block_size=8, **options))
    return engine.generate(prompts, PARAMS)


def prompt_logprobs(output: RequestOutput) -> torch.Tensor:
    assert output.prompt_logprobs is not None
    return torch.tensor([next(iter(one.values())) for one in output.prompt_logprobs if one is not None])


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"kv_cache_dtype": "int8"}, 0.05),
        ({"kv_cache_dtype": "fp8"}, 0.15),
        ({"kv_cache_dtype": "bfloat16"}, 0.05),
        ({"dtype": "bfloat16"}, 0.3),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, 0.4),
    ],
)
def test_lower_precision_is_close_however_it_is_batched(
    student_dir: Path, options: dict[str, Any], tolerance: float
) -> None:
    exact = prompt_logprobs(serve(student_dir, [PROMPT])[0])
    for prompts, more in (([PROMPT], {}), ([PROMPT[:7], PROMPT, PROMPT[::-1]], {"max_num_batched_tokens": 11})):
        output = serve(student_dir, prompts, **options, **more)[prompts.index(PROMPT)]
        error = (prompt_logprobs(output) - exact).abs().max()
        assert 0 < error < tolerance


def test_eight_bits_make_room_for_almost_twice_the_blocks(student_dir: Path) -> None:
    blocks = {
        dtype: LLMEngine.from_pretrained(
            student_dir, EngineConfig(dtype="bfloat16", kv_cache_dtype=dtype, kv_cache_bytes=512_000)
        ).num_blocks
        for dtype in ("auto", "fp8", "int8", "float32")
    }
    # 5 cache layers of K and V, 2 heads of 8 numbers: 16 tokens take 5,120 bytes in bfloat16; in 8 bits a head takes 10
    # bytes instead of 16, of which 2 are its scale.
    assert blocks == {"float32": 50, "auto": 100, "fp8": 160, "int8": 160}


def test_a_cache_without_room_for_one_block_is_refused(student_dir: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"kv_cache_bytes is 100; one block of 16 tokens takes \d+ bytes"):
        LLMEngine.from_pretrained(student_dir, EngineConfig(kv_cache_bytes=100))


def test_what_can_never_fit_is_refused_with_the_numbers(student_dir: Path) -> None:
    engine = LLMEngine.from_pretrained(student_dir, EngineConfig(kv_cache_bytes=1 << 15, block_size=4))
    slots = engine.num_blocks * 4
    with pytest.raises(InvalidInputError, match=rf"needs the KV of {slots + 1} tokens .* cache holds {slots}"):
        engine.add_request([1] * 10, SamplingParams(max_tokens=slots - 8))
    assert engine.generate([[1] * 10], SamplingParams(max_tokens=slots - 9, ignore_eos=True))[0].finished
