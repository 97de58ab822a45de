"""The engine serves every family: chunks, batches, windows, latents and experts give the plain forward's tokens."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swiftkv_platform.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, kernels, memory
from swiftkv_platform.engine.varlen import reference_varlen_attn
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import convert, export, load_dense
from tests.support.parameters import KINDS, in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher, random_teacher, random_tokens

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=17, block_size=4, kv_cache_bytes=1 << 20)


PROMPTS = [random_tokens(size, seed=size).tolist() for size in (40, 3, 25)]
"""Prompts longer and shorter than the sliding windows."""


@torch.no_grad()
def check(plain: Any, output: RequestOutput) -> None:
    """Assert that each token is the plain forward's best, within 1e-4, and prompt log-probabilities agree, if any."""
    text = torch.tensor([output.prompt_token_ids + output.token_ids])
    logits = plain(text, use_cache=False).logits[0, :-1]
    size = len(output.prompt_token_ids)
    behind = logits.amax(-1) - logits.gather(1, text[0, 1:, None]).squeeze(1)
    assert behind[size - 1 :].max() < 1e-4
    expected = logits.log_softmax(-1).gather(1, text[0, 1:, None])[: size - 1, 0].tolist()
    if output.prompt_logprobs is None:
        return
    assert prompt_logprobs(output).tolist() == pytest.approx(expected, abs=1e-3)


def prompt_logprobs(output: RequestOutput) -> torch.Tensor:
    return torch.tensor([next(iter(one.values())) for one in output.prompt_logprobs if one is not None])


def score_prompts(directory: Path, **options: Any) -> torch.Tensor:
    """Return the log-probabilities of all tokens of `PROMPTS` after their first, by an engine with other options."""
    engine = LLMEngine.from_pretrained(directory, CONFIG.model_copy(update=options))
    found = torch.cat([prompt_logprobs(output) for output in engine.generate(PROMPTS, PARAMS)])
    engine.assert_consistent()
    return found


@pytest.mark.parametrize(("name", "by_tables"), in_turn(FAMILY_CONFIGS, [False, True]))
def test_every_family_is_served(name: str, by_tables: bool, tmp_path: Path) -> None:
    """The student and the dense model, with attention over runs of slots or over block tables."""
    family_teacher(name).save_pretrained(tmp_path / "dense")
    student = disturb(convert(tmp_path / "dense", num_key_value_layers=2, key_value_group_size=2))
    student.save_pretrained(tmp_path / "student")
    for path, plain in ((tmp_path / "student", student), (tmp_path / "dense", load_dense(tmp_path / "dense"))):
        with patch.object(memory, "choose_operator", return_value=reference_varlen_attn if by_tables else None):
            engine = LLMEngine.from_pretrained(path, CONFIG)
        for params in (PARAMS, replace(PARAMS, prompt_logprobs=None)):
            for output in engine.generate(PROMPTS, params):
                assert len(output.token_ids) == PARAMS.max_tokens
                check(plain.eval(), output)
        engine.assert_consistent()
        assert engine.num_free_blocks == engine.num_blocks


@pytest.mark.parametrize("sharing", ["mqa", "mha"])
def test_students_with_their_own_number_of_heads_are_served(sharing: Any, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2, "sharing": sharing}
    student = disturb(convert(family_teacher("llama"), **shape, own_output_projection=sharing == "mqa")).eval()
    student.save_pretrained(tmp_path)
    for output in LLMEngine.from_pretrained(tmp_path, CONFIG).generate(PROMPTS, PARAMS):
        check(student, output)


@pytest.mark.parametrize(
    ("name", "g"), in_turn((name for name in FAMILY_CONFIGS if "deepseek" not in name), [2, None], KINDS[:3])
)
def test_in_bfloat16_the_kernels_are_as_exact_as_torch(name: str, g: int | None, tmp_path: Path) -> None:
    model: Any = family_teacher(name, head_dim=32)
    if g is not None:
        model = disturb(convert(model, num_key_value_layers=2, key_value_group_size=g))
    model.to(torch.bfloat16).save_pretrained(tmp_path)

    logprobs = partial(score_prompts, tmp_path)
    exact, native, by_torch = logprobs(dtype="float32"), logprobs(), logprobs(native_kernels=False)
    assert torch.equal(native, by_torch) != kernels.is_available()
    assert (native - exact).square().mean().sqrt() < 1.3 * (by_torch - exact).square().mean().sqrt()


@pytest.mark.parametrize(("name", "form"), in_turn(FAMILY_CONFIGS, ["int8", "int4", "mixed"], KINDS))
def test_products_in_integers_are_about_as_exact_as_the_floats(name: str, form: Any, tmp_path: Path) -> None:
    """Compare a student with integer weights to the same weights converted back to floats."""
    student = disturb(convert(family_teacher(name, head_dim=32), num_key_value_layers=2, key_value_group_size=2))
    try:
        export(student.to(torch.bfloat16), tmp_path / "served", quantize=form)
    except ModelError as error:  # no projection with inputs in groups of 32
        assert form != "int8"
        pytest.skip(str(error))

    logprobs = partial(score_prompts, tmp_path / "served")
    exact, integers, floats = logprobs(dtype="float32"), logprobs(), logprobs(weights="bfloat16")
    assert torch.equal(integers, floats) != kernels.is_available()
    # A router that is nearly undecided may choose another expert for a token. Products in int4 round inputs to 8 bits.
    factor = 1.5 if form == "int8" else 3.0
    assert (integers - exact).abs().median() < factor * (floats - exact).abs().median()


# Lower precision: an 8-bit KV cache, bfloat16 with reordered weights; close to float32 however requests are batched.


@pytest.fixture(scope="module")
def student_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student")
    disturb(convert(random_teacher(), num_key_value_layers=3, key_value_group_size=2)).save_pretrained(directory)
    return directory


def serve(directory: Path, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    engine = LLMEngine.from_pretrained(directory, EngineConfig(kv_cache_bytes=1 << 20, block_size=8, **options))
    return engine.generate(prompts, replace(PARAMS, max_tokens=8))


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"kv_cache_dtype": "int8"}, 0.05),
        ({"kv_cache_dtype": "fp8"}, 0.15),
        ({"kv_cache_dtype": "bfloat16"}, 0.05),
        ({"dtype": "bfloat16"}, 0.3),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, 0.4),
        ({"dtype": "bfloat16", "weights": "int8", "kv_cache_dtype": "int8"}, 0.4),
        ({"dtype": "float32", "weights": "int8"}, 0.3),
    ],
    ids=str,
)
def test_lower_precision_is_close_however_batched(student_dir: Path, options: dict[str, Any], tolerance: float) -> None:
    prompt = PROMPTS[0]
    exact = prompt_logprobs(serve(student_dir, [prompt])[0])
    for prompts, more in (([prompt], {}), ([prompt[:7], prompt, prompt[::-1]], {"max_num_batched_tokens": 11})):
        output = serve(student_dir, prompts, **options, **more)[prompts.index(prompt)]
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


def test_what_can_never_fit_is_refused_with_the_numbers(student_dir: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"kv_cache_bytes is 100; one block of 16 tokens takes \d+ bytes"):
        LLMEngine.from_pretrained(student_dir, EngineConfig(kv_cache_bytes=100))
    engine = LLMEngine.from_pretrained(student_dir, EngineConfig(kv_cache_bytes=1 << 15, block_size=4))
    slots = engine.num_blocks * 4
    with pytest.raises(InvalidInputError, match=rf"needs KV cache for {slots + 1} tokens .* cache holds {slots}"):
        engine.add_request([1] * 10, SamplingParams(max_tokens=slots - 8))
    assert engine.generate([[1] * 10], SamplingParams(max_tokens=slots - 9, ignore_eos=True))[0].finished


# LongRoPE: rotary factors for short sequences and others for long ones.

ORIGINAL, EXTENDED = 32, 128


@pytest.fixture(scope="module", params=["llama", "phi3"])
def longrope_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": EXTENDED / ORIGINAL}
    rope |= {"original_max_position_embeddings": ORIGINAL, "short_factor": [1.0] * 4}
    rope["long_factor"] = [1.0, 2.0, 4.0, 8.0]
    path = tmp_path_factory.mktemp("longrope")
    changes: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": EXTENDED, "rope_parameters": rope}
    if request.param == "llama":
        random_teacher(**changes).save_pretrained(path)
    else:
        rope["partial_rotary_factor"] = 1.0
        changes["original_max_position_embeddings"] = ORIGINAL
        family_teacher("phi3", **changes).save_pretrained(path)
    return path


def test_longrope_within_its_original_length_is_the_plain_forward(longrope_dir: Path) -> None:
    """Tokens do not depend on the lengths of other requests; lengths at which the factors would change are refused."""
    for length in (None, ORIGINAL + 1):
        with pytest.raises(ModelError, match=f"max_model_len is {length or EXTENDED}.*{ORIGINAL}") as error:
            LLMEngine.from_pretrained(longrope_dir, EngineConfig(max_model_len=length))
        assert error.value.field == "max_model_len"
    config = EngineConfig(max_model_len=ORIGINAL, max_num_batched_tokens=7, enable_prefix_caching=False)
    engine, plain = LLMEngine.from_pretrained(longrope_dir, config), load_dense(longrope_dir)
    assert engine.max_model_len == ORIGINAL
    short, long = list(range(20)), list(range(100, 130))
    for prompts in ([short, long], [short], [long]):
        for output in engine.generate(prompts, replace(PARAMS, max_tokens=1)):
            check(plain, output)
