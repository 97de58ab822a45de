"""Every family: both modes equal a second implementation, teacher mode equals the family's own class, and every
decoding method gives the tokens of the plain forward pass."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftkv_platform.families import FAMILIES
from swiftkv_platform.model import convert, load_dense
from swiftkv_platform.model.cache import count_cache_bytes
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from tests.support import reference
from tests.support.parameters import KINDS, WIDE, few, in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, WINDOW, disturb, family_teacher

LAYER_MAPS = {"short-last-group": (2, 2), "l=L-1": (4, 1), "g=1": (2, 1), "g=2": (1, 2)}
"""l and g for 5 layers; the first map ends with a group of one layer."""
every_family = pytest.mark.parametrize("name", FAMILY_CONFIGS)


def layer_maps(*others: int) -> pytest.MarkDecorator:
    """Parametrize by each family with the first map, and with one of the maps numbered `others`, in turn."""
    cases = []
    for at, name in enumerate((*FAMILY_CONFIGS, "llama-biased")):
        also = others[at % len(others)] if others else 0
        for number, (of, pair) in enumerate(LAYER_MAPS.items()):
            cases.append(pytest.param(name, *pair, id=f"{name}-{of}", marks=[] if number in (0, also) else WIDE))
    return pytest.mark.parametrize(("name", "l", "g"), cases)


GENERATE = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256}


def make_student(name: str, l: int = 2, g: int = 2) -> Any:  # noqa: E741  # the paper's l
    return disturb(convert(family_teacher(name), num_key_value_layers=l, key_value_group_size=g))


@torch.no_grad()
def assert_greedy(model: Any, prompt: torch.Tensor, tokens: torch.Tensor, way: str) -> None:
    """Assert that each token is the plain forward's best for its prefix, within 1e-4."""
    text = torch.cat((prompt, tokens))
    logits = model(text[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert len(tokens) == GENERATE["max_new_tokens"], way
    behind = logits.amax(-1) - logits.gather(1, tokens[:, None]).squeeze(1)
    assert behind.max() <= 1e-4, f"{way}: {behind}"


def test_the_table_is_covered() -> None:
    assert {name.partition("-")[0] for name in FAMILY_CONFIGS} == set(FAMILIES)
    page = (Path(__file__).parents[2] / "docs" / "your-model.md").read_text()
    assert [name for name in FAMILIES if f"| `{name}` |" not in page] == []


@layer_maps(1, 2, 3)
@torch.no_grad()
def test_both_modes_equal_the_reference(name: str, l: int, g: int, prompt: torch.Tensor) -> None:  # noqa: E741
    student = make_student(name, l, g)
    state, inv_freq = student.state_dict(), reference.frequencies(student.model.rotary_emb)
    for implementation in ("sdpa", "eager"):
        student.set_attn_implementation(implementation)
        for swiftkv in (True, False):
            expected = reference.logits(state, student.config, prompt, inv_freq, swiftkv=swiftkv)
            actual = student.swiftkv(swiftkv)(prompt[None], use_cache=False).logits[0]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@every_family
@torch.no_grad()
def test_a_copied_start_keeps_the_keys_and_values_of_layer_l(name: str, prompt: torch.Tensor) -> None:
    student = convert(family_teacher(name), num_key_value_layers=2)
    mine, teachers = (
        student.swiftkv(on)(prompt[None], use_cache=True).past_key_values.layers[2] for on in (True, False)
    )
    torch.testing.assert_close((mine.keys, mine.values), (teachers.keys, teachers.values), atol=1e-5, rtol=1e-5)


@every_family
@torch.no_grad()
def test_teacher_mode_and_dense_models_equal_the_familys_class(name: str, prompt: torch.Tensor, tmp_path: Path) -> None:
    teacher = family_teacher(name)
    teacher.save_pretrained(tmp_path)
    dense = load_dense(tmp_path)
    assert dense.state_dict().keys() == teacher.state_dict().keys()
    assert dense.dtype == torch.float32
    expected, tokens = teacher(prompt[None]).logits, teacher.generate(prompt[None], **GENERATE)
    student = disturb(convert(teacher, num_key_value_layers=2, key_value_group_size=2)).swiftkv(False)
    for model in (dense, student):
        torch.testing.assert_close(model(prompt[None]).logits, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(model.generate(prompt[None], **GENERATE), tokens)


@layer_maps()
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


@pytest.mark.parametrize(("name", "implementation"), in_turn(FAMILY_CONFIGS, ["eager", "sdpa"], KINDS))
@torch.no_grad()
def test_logits_to_keep_select_without_changing(name: str, implementation: str, prompt: torch.Tensor) -> None:
    student = make_student(name)
    student.set_attn_implementation(implementation)
    full = student(prompt[None], use_cache=False).logits
    sevenths = torch.arange(40) % 7 == 0
    for keep in (1, 5, 40, 0, torch.tensor([30, -2]), torch.tensor([[7, 3]]), sevenths, sevenths[None]):
        kept = student(prompt[None], use_cache=True, logits_to_keep=keep).logits
        expected = full[:, keep.flatten()] if isinstance(keep, torch.Tensor) else full[:, -keep:]
        if keep is not sevenths and isinstance(keep, torch.Tensor) and keep.dtype == torch.bool:
            expected = expected[0]  # rows may have different lengths, so transformers flattens them
        torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", few([*FAMILY_CONFIGS, "llama-biased"]))
@torch.no_grad()
def test_round_trip(name: str, prompt: torch.Tensor, tmp_path: Path) -> None:
    """A teacher saved by transformers converts; the saved student loads whole, its teacher included, in the mode that
    is asked for rather than the mode that it was saved in."""
    teacher = family_teacher(name)
    teacher.save_pretrained(tmp_path / "teacher")
    shape: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": name != "mistral"}
    student = disturb(convert(tmp_path / "teacher", **shape))
    expected = student(prompt[None]).logits
    student.swiftkv(False).save_pretrained(tmp_path / "student")
    on_disk = Checkpoint.open(tmp_path / "student").shards
    of_teacher = {name for name in on_disk if "swiftkv" not in name and not name.startswith("exit_")}
    assert of_teacher == Checkpoint.open(tmp_path / "teacher").shards.keys()
    for load in (AutoModelForCausalLM.from_pretrained, type(student).from_pretrained):
        in_teacher_mode = load(tmp_path / "student", swiftkv=False)
        assert in_teacher_mode.config.swiftkv
        assert torch.equal(in_teacher_mode(prompt[None]).logits, student(prompt[None]).logits)
        loaded, _ = load(tmp_path / "student", output_loading_info=True)
        assert type(loaded) is type(student)
        assert loaded.config.model_type == f"{name.partition('-')[0]}_swiftkv"
        assert torch.equal(loaded(prompt[None]).logits, expected)
    if shape["early_exit"]:
        x = torch.randn(2, student.config.hidden_size)
        assert torch.equal(loaded.exit_logits(x), student.exit_logits(x))
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


@pytest.mark.parametrize(("swiftkv", "layers"), [(True, 4), (False, 5)])
@torch.no_grad()
def test_latent_attention_caches_latents(swiftkv: bool, layers: int, prompt: torch.Tensor) -> None:
    student = make_student("deepseek_v2-lora").swiftkv(swiftkv)
    cache = student(prompt[None], use_cache=True, logits_to_keep=1).past_key_values
    rank, rope = student.config.kv_lora_rank, student.config.qk_rope_head_dim
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 1, 40, rank)] * layers
    assert [tuple(layer.values.shape) for layer in cache.layers] == [(1, 1, 40, rope)] * layers
    assert count_cache_bytes(cache) == layers * 40 * (rank + rope) * 4


@torch.no_grad()
def test_a_mixed_group_keeps_its_longest_window(prompt: torch.Tensor) -> None:
    student = make_student("qwen2-mixed")  # groups: layers (2, 3) sliding + full, (4) sliding
    cache = student(prompt[None], use_cache=True, logits_to_keep=1).past_key_values
    assert [layer.is_sliding for layer in cache.layers] == [False, True, False, True]
    assert cache.layers[2].keys.shape[2] == 40
    assert cache.layers[3].keys.shape[2] == WINDOW - 1  # the next token takes the last place


@torch.no_grad()
def test_a_student_drops_out_what_its_teacher_does(prompt: torch.Tensor) -> None:
    student = disturb(convert(family_teacher("seed_oss", residual_dropout=1.0), num_key_value_layers=2)).train()
    x = student.model.embed_tokens(prompt)  # no residual branch adds to it
    torch.testing.assert_close(student(prompt[None]).logits[0], student.lm_head(student.model.norm(x)))


GOLDEN = sorted((Path(__file__).parents[3] / "shared" / "golden").glob("*"))


@pytest.mark.skipif(not GOLDEN, reason="the reference implementation's outputs are not on this machine")
@pytest.mark.parametrize("directory", GOLDEN, ids=lambda path: path.name)
@torch.no_grad()
def test_reference_implementation_outputs(directory: Path, tmp_path: Path) -> None:
    """The reference's checkpoints load unchanged, and load again after saving."""
    expected = load_file(directory / "expected.safetensors")
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(tmp_path)
    assert Checkpoint.open(tmp_path).shards.keys() == Checkpoint.open(directory).shards.keys()
    greedy = expected["greedy"]
    for path in (directory, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(path)
        for swiftkv, name in ((False, "teacher_logits"), (True, "student_logits")):
            actual = model.swiftkv(swiftkv)(expected["input_ids"], use_cache=False).logits
            torch.testing.assert_close(actual, expected[name], atol=1e-4, rtol=0)
        model.generation_config.eos_token_id = None
        arguments = GENERATE | {"max_new_tokens": greedy.shape[1] - 20}
        for use_cache in (True, False):
            assert torch.equal(model.generate(greedy[:, :20], use_cache=use_cache, **arguments), greedy), (
                f"{use_cache=}"
            )
