"""Other numbers of key-value heads than the teacher's above layer l (paper, appendix C): values, cache, starts, round
trips."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert
from swiftkv_platform.model.cache import count_cache_bytes
from swiftkv_platform.model.weights.lazy_student import share_heads
from swiftkv_platform.planning import equal_cache_group_size
from tests.support import reference
from tests.support.parameters import in_turn, pairwise
from tests.support.tiny_models import disturb, family_teacher, random_teacher

HEADS = {"gqa": 2, "mqa": 1, "mha": 8}
GENERATE = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 256}


def make_student(sharing: Any, g: int = 2, *, moved: bool = True) -> Any:
    teacher = random_teacher(attention_bias=True)
    student = convert(teacher, num_key_value_layers=3, key_value_group_size=g, sharing=sharing)
    if moved:
        disturb(student)
    student.generation_config.eos_token_id = None
    return student


@pytest.mark.parametrize(("sharing", "implementation", "g"), pairwise(["mqa", "mha"], ["eager", "sdpa"], [1, 2]))
def test_both_modes_equal_the_reference(sharing: str, implementation: str, g: int, prompt: torch.Tensor) -> None:
    student = make_student(sharing, g)
    student.set_attn_implementation(implementation)
    state, config, inv_freq = student.state_dict(), student.config, student.model.rotary_emb.inv_freq
    for swiftkv in (True, False):
        expected = reference.logits(state, config, prompt, inv_freq, swiftkv=swiftkv)
        with torch.no_grad():
            actual = student.swiftkv(swiftkv)(prompt[None], use_cache=False).logits[0]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    expected_tokens = reference.greedy(state, config, prompt.tolist(), inv_freq, 8)
    for use_cache in (True, False):
        generated = student.swiftkv(True).generate(prompt[None], use_cache=use_cache, **GENERATE)
        assert generated[0, len(prompt) :].tolist() == expected_tokens, f"{use_cache=}"


@pytest.mark.parametrize("sharing", ["mqa", "mha"])
@torch.no_grad()
def test_the_cache_holds_the_shared_heads(sharing: str, prompt: torch.Tensor, tmp_path: Path) -> None:
    """The same holds for a student loaded from disk."""
    student = make_student(sharing)
    output = student(prompt[None], use_cache=True)
    heads = [student.config.get_cache_num_key_value_heads(i) for i in range(5)]
    assert heads == [2, 2, 2, HEADS[sharing], HEADS[sharing]]
    assert [layer.keys.shape[1] for layer in output.past_key_values.layers] == heads
    assert count_cache_bytes(output.past_key_values) == sum(heads) * 2 * 40 * 8 * 4
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_key_value_heads_swiftkv == HEADS[sharing]
    assert torch.equal(loaded(prompt[None]).logits, output.logits)


def test_starts_of_shared_heads(prompt: torch.Tensor) -> None:
    """A single head starts as the mean over heads and layers; repeated heads start equal to grouped-query attention."""
    student = make_student("mqa", moved=False)
    layers = student.model.layers
    both = [layers[i].self_attn.k_proj.weight.unflatten(0, (2, 8)).mean(0) for i in (3, 4)]
    torch.testing.assert_close(layers[3].self_attn.k_proj_swiftkv.weight, torch.stack(both).mean(0))
    biases = [layers[i].self_attn.v_proj.bias.unflatten(0, (2, 8)).mean(0) for i in (3, 4)]
    torch.testing.assert_close(layers[3].self_attn.v_proj_swiftkv.bias, torch.stack(biases).mean(0))
    with torch.no_grad():
        expected = make_student("gqa", moved=False)(prompt[None]).logits
        actual = make_student("mha", moved=False)(prompt[None]).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    tensor = torch.arange(4.0).repeat_interleave(2)[:, None]  # four heads of two dimensions
    assert share_heads(tensor, 4, 2).flatten().tolist() == [0.5, 0.5, 2.5, 2.5]
    assert share_heads(tensor, 4, 8).unflatten(0, (8, 2))[:, 0].flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_equal_cache_of_table_c1() -> None:
    """Llama-3.1-8B has 16 upper layers and 8 key-value heads of 32; compare to AcrossKV-GQA with group size `g`."""
    cases = ("mha", 4, 16), ("mqa", 4, 1), ("mha", 1, 4), ("mha", 2, 8), ("gqa", 4, 4), ("mha", 16, 16)
    for sharing, g, expected in cases:
        heads = {"num_key_value_heads": 8, "num_key_value_heads_swiftkv": {"gqa": 8, "mqa": 1, "mha": 32}[sharing]}
        assert equal_cache_group_size(16, **heads, key_value_group_size=g) == expected


def test_sharing_is_refused_where_heads_do_not_divide_and_for_latents() -> None:
    teacher = random_teacher(num_attention_heads=12, num_key_value_heads=4, hidden_size=96)
    config = convert(teacher, num_key_value_layers=3).config
    with pytest.raises(ModelError, match="num_key_value_heads_swiftkv is 3; it must divide the 12 query heads"):
        type(config)(**{**config.to_dict(), "num_key_value_heads_swiftkv": 3})
    with pytest.raises(ModelError, match="one latent for all heads") as caught:
        convert(family_teacher("deepseek_v2"), num_key_value_layers=3, sharing="mqa")
    assert caught.value.field == "swiftkv.sharing"
    with pytest.raises(ModelError, match="normalizes the keys of all heads together") as caught:
        convert(family_teacher("olmo2"), num_key_value_layers=3, sharing="mha")
    assert caught.value.field == "swiftkv.sharing"


@pytest.mark.parametrize(("name", "sharing"), in_turn(["mistral", "qwen2-mixed", "qwen3"], ["mqa", "mha"]))
@torch.no_grad()
def test_other_families_decode_as_uncached(name: str, sharing: Any, prompt: torch.Tensor) -> None:
    student = disturb(convert(family_teacher(name), num_key_value_layers=2, key_value_group_size=2, sharing=sharing))
    cached, uncached = (student.generate(prompt[None], use_cache=use, **GENERATE) for use in (True, False))
    assert torch.equal(cached, uncached)
