"""Every family: both modes equal a second implementation, teacher mode the family's own class, and each way to decode
gives the tokens of the plain forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.model import FAMILIES, convert, load_dense
from swiftkv_platform.model.cache import cache_bytes
from swiftkv_platform.model.checkpoint import Checkpoint
from tests import reference
from tests.tiny_models import FAMILY_CONFIGS, WINDOW, disturb, family_teacher

every_family = pytest.mark.parametrize("name", FAMILY_CONFIGS)
latent_families = pytest.mark.parametrize("name", [name for name in FAMILY_CONFIGS if name.startswith("deepseek")])
layer_maps = pytest.mark.parametrize(
    ("l", "g"), [(4, 1), (2, 1), (1, 2), (2, 2)], ids=["l=L-1", "g=1", "g=2", "short-last-group"]
)  # of 5 layers
GENERATE = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256}


def make_student(name: str, l: int = 2, g: int = 2) -> Any:  # noqa: E741  # the paper's l
    return disturb(convert(family_teacher(name), num_key_value_layers=l, key_value_group_size=g))


@pytest.fixture
def prompt() -> torch.Tensor:
    """Longer than the sliding windows."""
    return torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def assert_greedy(model: Any, prompt: torch.Tensor, tokens: torch.Tensor, way: str) -> None:
    """Each token is the plain forward's best after those before it; a tie within 1e-4 excuses the second best."""
    text = torch.cat((prompt, tokens))
    logits = model(text[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert len(tokens) == GENERATE["max_new_tokens"], way
    behind = logits.amax(-1) - logits.gather(1, tokens[:, None]).squeeze(1)
    assert behind.max() <= 1e-4, f"{way}: {behind}"


def test_the_table_is_covered() -> None:
    assert {name.partition("-")[0] for name in FAMILY_CONFIGS} == set(FAMILIES)


@every_family
@layer_maps
@torch.no_grad()
def test_both_modes_equal_the_reference(name: str, l: int, g: int, prompt: torch.Tensor) -> None:  # noqa: E741
    student = make_student(name, l, g)
    state, inv_freq = student.state_dict(), student.model.rotary_emb.inv_freq
    for swiftkv in (True, False):
        expected = reference.logits(state, student.config, prompt, inv_freq, swiftkv=swiftkv)
        actual = student.swiftkv(swiftkv)(prompt[None], use_cache=False).logits[0]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@every_family
@torch.no_grad()
def test_teacher_mode_equals_the_family_class(name: str, prompt: torch.Tensor) -> None:
    teacher = family_teacher(name)
    expected = teacher(prompt[None]).logits
    tokens = teacher.generate(prompt[None], **GENERATE)
    student = disturb(convert(teacher, num_key_value_layers=2, key_value_group_size=2)).swiftkv(False)
    torch.testing.assert_close(student(prompt[None]).logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(student.generate(prompt[None], **GENERATE), tokens)


@every_family
@torch.no_grad()
def test_a_dense_model_is_the_teacher(name: str, prompt: torch.Tensor, tmp_path: Path) -> None:
    teacher = family_teacher(name)
    teacher.save_pretrained(tmp_path)
    dense = load_dense(tmp_path)
    assert dense.state_dict().keys() == teacher.state_dict().keys()
    assert dense.dtype == torch.float32
    torch.testing.assert_close(dense(prompt[None]).logits, teacher(prompt[None]).logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(dense.generate(prompt[None], **GENERATE), teacher.generate(prompt[None], **GENERATE))


@every_family
@layer_maps
@torch.no_grad()
def test_every_way_to_decode_gives_the_same_tokens(name: str, l: int, g: int, prompt: torch.Tensor) -> None:  # noqa: E741
    student = make_student(name, l, g)
    cached = student.generate(prompt[None], **GENERATE)[0, len(prompt) :]
    assert_greedy(student, prompt, cached, "cached, prefill skipped")
    padded = torch.cat((torch.full((9,), 256), prompt))
    other = torch.cat((prompt, torch.arange(9)))
    mask = torch.ones(2, len(padded), dtype=torch.long)
    mask[0, :9] = 0
    batch = student.generate(torch.stack((padded, other)), attention_mask=mask, **GENERATE)[:, len(padded) :]
    assert_greedy(student, prompt, batch[0], "left-padded in a batch")
    assert_greedy(student, other, batch[1], "beside it")
    cache, tokens = None, []
    for chunk in prompt.split(11):
        output = student(chunk[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    while len(tokens) < GENERATE["max_new_tokens"]:
        tokens.append(output.logits[0, -1].argmax())
        output = student(tokens[-1].view(1, 1), past_key_values=cache, use_cache=True)
    assert_greedy(student, prompt, torch.stack(tokens), "chunked")
    assert len(cache.layers) == student.config.layer_map.num_kv_cache_layers


@every_family
@torch.no_grad()
def test_skipped_prefill_equals_full_depth(name: str, prompt: torch.Tensor) -> None:
    student = make_student(name)
    full = student(prompt[None], use_cache=False).logits
    for keep in (1, 5, torch.tensor([30, -2])):
        kept = student(prompt[None], use_cache=True, logits_to_keep=keep).logits
        expected = full[:, keep] if isinstance(keep, torch.Tensor) else full[:, -keep:]
        torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


@every_family
@torch.no_grad()
def test_packed_rows_keep_samples_apart(name: str, prompt: torch.Tensor) -> None:
    """Training's input, on both of transformers' attention functions that a CPU has."""
    student = make_student(name)
    positions = torch.cat((torch.arange(25), torch.arange(15)))[None]
    expected = torch.cat([student(part[None], use_cache=False).logits[0] for part in prompt.split([25, 15])])
    for implementation in ("sdpa", "eager"):
        student.set_attn_implementation(implementation)
        packed = student(prompt[None], position_ids=positions, use_cache=False).logits[0]
        torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)


@every_family
@torch.no_grad()
def test_round_trip(name: str, prompt: torch.Tensor, tmp_path: Path) -> None:
    """A teacher that transformers saved converts; the student comes back whole, its teacher included."""
    teacher = family_teacher(name)
    teacher.save_pretrained(tmp_path / "teacher")
    student = disturb(convert(tmp_path / "teacher", num_key_value_layers=2, key_value_group_size=2))
    student.save_pretrained(tmp_path / "student")
    on_disk = Checkpoint.open(tmp_path / "student").shards
    assert {name for name in on_disk if "swiftkv" not in name} == Checkpoint.open(tmp_path / "teacher").shards.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert loaded.config.model_type == f"{name.partition('-')[0]}_swiftkv"
    assert torch.equal(loaded(prompt[None]).logits, student(prompt[None]).logits)
    teacher_logits = loaded.swiftkv(False)(prompt[None]).logits
    torch.testing.assert_close(teacher_logits, teacher(prompt[None]).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2-lora"])
@torch.no_grad()
def test_rope_scaling_as_published_checkpoints_spell_it(name: str, prompt: torch.Tensor, tmp_path: Path) -> None:
    student = make_student(name)
    student.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(prompt[None]).logits, student(prompt[None]).logits)


@every_family
@torch.no_grad()
def test_one_matrix_product_for_all_groups(name: str, prompt: torch.Tensor) -> None:
    student = make_student(name)
    before = student(prompt[None]).logits
    student.model.fuse_shared_key_value()
    torch.testing.assert_close(student(prompt[None]).logits, before, atol=1e-5, rtol=1e-5)
    weight, bias = student.model._fused_key_value
    projections = [p for i in (2, 4) for p in student.model.layers[i].self_attn.input_projections]
    assert (bias is not None) == (projections[0].bias is not None)
    assert {p.weight.untyped_storage().data_ptr() for p in projections} == {weight.untyped_storage().data_ptr()}
    assert sum(p.weight.numel() for p in projections) == weight.numel()


@pytest.mark.parametrize(("swiftkv", "layers"), [(True, 4), (False, 5)])
@latent_families
@torch.no_grad()
def test_latent_attention_caches_latents(name: str, swiftkv: bool, layers: int, prompt: torch.Tensor) -> None:
    student = make_student(name).swiftkv(swiftkv)
    cache = student(prompt[None], use_cache=True, logits_to_keep=1).past_key_values
    rank, rope = student.config.kv_lora_rank, student.config.qk_rope_head_dim
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 1, 40, rank)] * layers
    assert [tuple(layer.values.shape) for layer in cache.layers] == [(1, 1, 40, rope)] * layers
    assert cache_bytes(cache) == layers * 40 * (rank + rope) * 4


@torch.no_grad()
def test_a_mixed_group_keeps_its_longest_window(prompt: torch.Tensor) -> None:
    student = make_student("qwen2-mixed")  # groups: layers (2, 3) sliding + full, (4) sliding
    cache = student(prompt[None], use_cache=True, logits_to_keep=1).past_key_values
    assert [layer.is_sliding for layer in cache.layers] == [False, True, False, True]
    assert cache.layers[2].keys.shape[2] == 40
    assert cache.layers[3].keys.shape[2] == WINDOW - 1  # the token that comes next takes the last place


@every_family
@pytest.mark.parametrize("g", [1, 2])
@torch.no_grad()
def test_calibration_improves_every_family(name: str, g: int) -> None:
    tokens = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(1))

    def error(calibration: Any) -> float:
        student = convert(family_teacher(name), num_key_value_layers=2, key_value_group_size=g, calibration=calibration)
        difference = student(tokens[24:]).logits - student.swiftkv(False)(tokens[24:]).logits
        return float(difference.norm())

    assert error(tokens[:24].split(8)) < error(None)
