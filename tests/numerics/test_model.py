"""The model against a second implementation of the forward pass, over l, g, biases, RoPE scaling, tied heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import convert
from swiftkv_platform.model.cache import cache_bytes
from swiftkv_platform.model.checkpoint import Checkpoint
from tests import reference
from tests.tiny_models import LLAMA3_ROPE, disturb, random_teacher

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "tied": {"tie_word_embeddings": True},
    "head-dim": {"head_dim": 16},
}


def make_student(variant: str = "plain", l: int = 3, g: int = 1, **kwargs: Any) -> Any:  # noqa: E741  # the paper's l
    """A student whose SwiftKV weights differ from the teacher's, so that mixing them up shows."""
    student = convert(random_teacher(**VARIANTS[variant]), num_key_value_layers=l, key_value_group_size=g, **kwargs)
    disturb(student)
    student.generation_config.eos_token_id = None  # random weights may emit it at any step
    return student


def reference_inputs(student: Any) -> tuple[dict[str, torch.Tensor], Any, torch.Tensor]:
    return student.state_dict(), student.config, student.model.rotary_emb.inv_freq


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("l", "g"), [(1, 1), (3, 1), (3, 2), (2, 4), (4, 2), (5, 1)])
def test_both_modes_equal_the_reference(variant: str, l: int, g: int, prompt: torch.Tensor) -> None:  # noqa: E741
    student = make_student(variant, l, g)
    state, config, inv_freq = reference_inputs(student)
    for swiftkv in (True, False):
        expected = reference.logits(state, config, prompt, inv_freq, swiftkv=swiftkv)
        with torch.no_grad():
            actual = student.swiftkv(swiftkv)(prompt[None], use_cache=False).logits[0]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_modes_differ(prompt: torch.Tensor) -> None:
    student = make_student()
    with torch.no_grad():
        difference = student(prompt[None]).logits - student.swiftkv(False)(prompt[None]).logits
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("l", "g"), [(3, 1), (3, 2), (1, 3)])
def test_generate_equals_the_reference(implementation: str, l: int, g: int, prompt: torch.Tensor) -> None:  # noqa: E741
    student = make_student(l=l, g=g)
    student.set_attn_implementation(implementation)
    expected = reference.greedy(*reference_inputs(student)[:2], prompt.tolist(), reference_inputs(student)[2], 12)
    for use_cache in (True, False):
        generated = student.generate(
            prompt[None], max_new_tokens=12, do_sample=False, use_cache=use_cache, pad_token_id=256
        )
        assert generated[0, len(prompt) :].tolist() == expected, f"{use_cache=}"


def test_teacher_mode_generates_with_a_full_cache(prompt: torch.Tensor) -> None:
    student = make_student(g=2).swiftkv(False)
    state, config, inv_freq = reference_inputs(student)
    expected = reference.greedy(state, config, prompt.tolist(), inv_freq, 8, swiftkv=False)
    generated = student.generate(prompt[None], max_new_tokens=8, do_sample=False, pad_token_id=256)
    assert generated[0, len(prompt) :].tolist() == expected


def test_left_padded_batch_equals_single_prompts(prompt: torch.Tensor) -> None:
    student = make_student(g=2)
    prompts = [prompt, prompt[:17], prompt[5:6]]
    batch = torch.zeros(len(prompts), len(prompt), dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, -len(ids) :], mask[row, -len(ids) :] = ids, 1
    arguments = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 256}
    generated = student.generate(batch, attention_mask=mask, **arguments)
    for row, ids in enumerate(prompts):
        single = student.generate(ids[None], **arguments)
        assert generated[row, len(prompt) :].tolist() == single[0, len(ids) :].tolist()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "keep",
    [
        1,
        3,
        40,
        0,
        torch.tensor([5, -1]),
        torch.tensor([[7, 3]]),
        (torch.arange(40) % 7 == 0)[None],
        torch.arange(40) % 7 == 0,
    ],
)
def test_logits_to_keep_selects_without_changing(
    implementation: str, keep: int | torch.Tensor, prompt: torch.Tensor
) -> None:
    student = make_student(g=2)
    student.set_attn_implementation(implementation)
    with torch.no_grad():
        full = student(prompt[None]).logits
        kept = student(prompt[None], logits_to_keep=keep).logits
    expected = full[:, keep.flatten()] if isinstance(keep, torch.Tensor) else full[:, -keep:]
    if isinstance(keep, torch.Tensor) and keep.dtype == torch.bool and keep.ndim == 2:
        expected = expected[0]  # rows may keep different numbers of positions, so transformers flattens them
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


def test_prefill_really_skips_the_upper_layers(prompt: torch.Tensor) -> None:
    student = make_student(l=3, g=2)
    seen: dict[int, int] = {}
    for i, layer in enumerate(student.model.layers):
        layer.mlp.register_forward_hook(lambda _m, args, _o, i=i: seen.__setitem__(i, args[0].shape[1]))
    with torch.no_grad():
        output = student(prompt[None], use_cache=True, logits_to_keep=1)
    assert [seen[i] for i in range(6)] == [40, 40, 40, 1, 1, 1]
    assert len(output.past_key_values.layers) == student.config.layer_map.num_kv_cache_layers == 5
    assert all(layer.get_seq_length() == 40 for layer in output.past_key_values.layers)
    head_bytes = 2 * 40 * student.config.num_key_value_heads * student.config.head_dim * 4
    assert cache_bytes(output.past_key_values) == 5 * head_bytes


def test_chunked_prefill_equals_one_pass(prompt: torch.Tensor) -> None:
    student = make_student(g=2)
    with torch.no_grad():
        whole = student(prompt[None]).logits[0, -1]
        cache = None
        for chunk in prompt.split(11):
            output = student(chunk[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
    torch.testing.assert_close(output.logits[0, -1], whole, atol=1e-5, rtol=1e-5)


def test_packed_rows_keep_samples_apart(prompt: torch.Tensor) -> None:
    student = make_student(g=2)
    positions = torch.cat((torch.arange(25), torch.arange(15)))[None]
    with torch.no_grad():
        packed = student(prompt[None], position_ids=positions, use_cache=False).logits[0]
        first = student(prompt[None, :25], use_cache=False).logits[0]
        second = student(prompt[None, 25:], use_cache=False).logits[0]
    torch.testing.assert_close(packed, torch.cat((first, second)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("early_exit", [False, True])
def test_round_trip(variant: str, early_exit: bool, prompt: torch.Tensor, tmp_path: Path) -> None:
    student = make_student(variant, g=2, early_exit=early_exit).swiftkv(False)
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlamaSwiftKVForCausalLM"
    assert loaded.config.model_type == "llama_swiftkv"
    with torch.no_grad():
        assert torch.equal(loaded.swiftkv(False)(prompt[None]).logits, student(prompt[None]).logits)
        student.swiftkv(True)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(prompt[None]).logits, student(prompt[None]).logits)
        if early_exit:
            x = torch.randn(2, student.config.hidden_size)
            assert torch.equal(loaded.exit_logits(x), student.exit_logits(x))


def test_teacher_mode_asked_for_at_loading_is_not_persisted(prompt: torch.Tensor, tmp_path: Path) -> None:
    student = make_student(g=2)
    student.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = student.swiftkv(False)(prompt[None]).logits
        for load in (AutoModelForCausalLM.from_pretrained, type(student).from_pretrained):
            loaded = load(tmp_path, swiftkv=False)
            assert torch.equal(loaded(prompt[None]).logits, expected)
            assert loaded.config.swiftkv
            loaded, _ = load(tmp_path, output_loading_info=True)  # without the argument: the student
            assert not torch.equal(loaded(prompt[None]).logits, expected)


def test_a_checkpoint_without_the_teachers_projections_is_a_student_alone(prompt: torch.Tensor, tmp_path: Path) -> None:
    student = make_student(g=2)
    student.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dropped = {f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in range(3, 6) for kind in "qkv"}
    save_file({name: t for name, t in tensors.items() if name not in dropped}, tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert dropped.isdisjoint(loaded.state_dict())
    with torch.no_grad():
        assert torch.equal(loaded(prompt[None]).logits, student(prompt[None]).logits)
    with pytest.raises(ModelError, match="exported without"):
        loaded.swiftkv(False)
    for load in (AutoModelForCausalLM.from_pretrained, type(loaded).from_pretrained):
        with pytest.raises(ModelError, match="exported without"):
            load(tmp_path, swiftkv=False)
    loaded.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(prompt[None]).logits, student(prompt[None]).logits)


def test_hidden_states_are_those_of_every_token(prompt: torch.Tensor) -> None:
    student = make_student()
    with torch.no_grad():
        output = student(prompt[None], output_hidden_states=True, logits_to_keep=1)
    assert len(output.hidden_states) == 7
    assert {state.shape for state in output.hidden_states} == {(1, 40, 64)}


def test_missing_tensors_are_refused_by_name(tmp_path: Path) -> None:
    student = make_student(l=3, g=1)
    student.config.key_value_group_size = 2
    student.save_pretrained(tmp_path)
    student.config.num_key_value_layers, student.config.key_value_group_size = 2, 1
    student.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.q_proj_swiftkv"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_key_value_layers": 7}, "1..5"),
        ({"num_key_value_layers": 6}, "1..5"),
        ({"num_key_value_layers": 0}, "1..5"),
        ({"num_key_value_layers": 4, "key_value_group_size": 3}, "1..2"),
    ],
)
def test_out_of_range_is_refused_before_weights_are_read(
    arguments: dict[str, int], message: str, tmp_path: Path
) -> None:
    random_teacher().config.save_pretrained(tmp_path)  # a configuration alone
    with pytest.raises(InvalidInputError, match=message):
        convert(tmp_path, **arguments)


def test_unknown_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 4}')
    with pytest.raises(ModelError, match=r"gpt2.*llama"):
        convert(tmp_path, num_key_value_layers=2)


def test_unreadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        convert(tmp_path / "no-such-model", num_key_value_layers=2)


GOLDEN = sorted((Path(__file__).parents[3] / "shared" / "golden").glob("*"))


@pytest.mark.skipif(not GOLDEN, reason="the reference implementation's outputs are not on this machine")
@pytest.mark.parametrize("again", [False, True], ids=["as-written", "round-trip"])
@pytest.mark.parametrize("directory", GOLDEN, ids=lambda path: path.name)
def test_reference_implementation_outputs(directory: Path, again: bool, tmp_path: Path) -> None:
    model, expected = AutoModelForCausalLM.from_pretrained(directory), load_file(directory / "expected.safetensors")
    if again:
        model.save_pretrained(tmp_path)
        assert Checkpoint.open(tmp_path).shards.keys() == Checkpoint.open(directory).shards.keys()
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for swiftkv, name in ((True, "student_logits"), (False, "teacher_logits")):
            actual = model.swiftkv(swiftkv)(expected["input_ids"], use_cache=False).logits
            torch.testing.assert_close(actual, expected[name], atol=1e-4, rtol=0)
    greedy = expected["greedy"]
    model.generation_config.eos_token_id = None
    arguments = {"max_new_tokens": greedy.shape[1] - 20, "do_sample": False, "pad_token_id": 256}
    for use_cache in (True, False):
        generated = model.swiftkv(True).generate(greedy[:, :20], use_cache=use_cache, **arguments)
        assert torch.equal(generated, greedy), f"{use_cache=}"
