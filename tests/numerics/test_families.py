"""Every family: teacher mode equals the family's own class, and each way to decode gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from swiftkv_platform.model import FAMILIES, convert

SHAPE = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
MIXED = ["full_attention", "sliding_attention"] * 3 + ["sliding_attention"]
TEACHERS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=16),
    "mistral-full": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-mixed": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=16, layer_types=MIXED),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
}
GENERATE = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256}


def make_teacher(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(TEACHERS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    return model


def make_student(name: str, l: int, g: int) -> Any:  # noqa: E741  # the paper's l
    student = convert(make_teacher(name), num_key_value_layers=l, key_value_group_size=g)
    with torch.no_grad():
        for parameter in student.swiftkv_parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return student


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(7))


def uncached_greedy(student: Any, prompt: torch.Tensor) -> list[int]:
    ids = prompt.tolist()
    with torch.no_grad():
        for _ in range(GENERATE["max_new_tokens"]):
            ids.append(int(student(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_table_is_covered() -> None:
    assert {name.partition("-")[0] for name in TEACHERS} == set(FAMILIES)


@pytest.mark.parametrize("name", TEACHERS)
def test_teacher_mode_equals_the_family_class(name: str, prompt: torch.Tensor) -> None:
    teacher = make_teacher(name)
    with torch.no_grad():
        expected = teacher(prompt[None]).logits
        tokens = teacher.generate(prompt[None], **GENERATE)
        student = convert(teacher, num_key_value_layers=3, key_value_group_size=2).swiftkv(False)
        torch.testing.assert_close(student(prompt[None]).logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(student.generate(prompt[None], **GENERATE), tokens)


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize(("l", "g"), [(3, 1), (2, 2), (6, 1)])
def test_every_way_to_decode_gives_the_same_tokens(name: str, l: int, g: int, prompt: torch.Tensor) -> None:  # noqa: E741
    student = make_student(name, l, g)
    expected = uncached_greedy(student, prompt)
    plain = student.generate(prompt[None], **GENERATE)[0, len(prompt) :]
    assert plain.tolist() == expected, "cached"

    padded = torch.cat((torch.full((9,), 256), prompt))
    batch = torch.stack((padded, padded.roll(-9)))
    batch[1, -9:] = torch.arange(9)
    mask = torch.ones_like(batch)
    mask[0, :9] = 0
    both = student.generate(batch, attention_mask=mask, **GENERATE)[:, len(padded) :]
    assert both[0].tolist() == expected, "left-padded in a batch"
    assert both[1].tolist() == uncached_greedy(student, batch[1]), "beside it"

    with torch.no_grad():
        cache = None
        for chunk in prompt.split(11):
            output = student(chunk[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
        tokens = [int(output.logits[0, -1].argmax())]
        while len(tokens) < len(expected):
            output = student(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
    assert tokens == expected, "chunked"
    assert len(cache.layers) == student.config.layer_map.num_kv_cache_layers


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("keep", [1, 5, torch.tensor([30, -2])])
def test_skipped_prefill_equals_full_depth(name: str, keep: int | torch.Tensor, prompt: torch.Tensor) -> None:
    student = make_student(name, 3, 2)
    with torch.no_grad():
        full = student(prompt[None], use_cache=False).logits
        kept = student(prompt[None], use_cache=True, logits_to_keep=keep).logits
    expected = full[:, keep] if isinstance(keep, torch.Tensor) else full[:, -keep:]
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TEACHERS)
def test_round_trip(name: str, prompt: torch.Tensor, tmp_path: Path) -> None:
    student = make_student(name, 3, 2)
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.model_type == f"{name.partition('-')[0]}_swiftkv"
    with torch.no_grad():
        assert torch.equal(loaded(prompt[None]).logits, student(prompt[None]).logits)


def test_a_mixed_group_keeps_its_longest_window(prompt: torch.Tensor) -> None:
    student = make_student("qwen2-mixed", 3, 2)  # groups: layers (3, 4) sliding + full, (5, 6) both sliding
    with torch.no_grad():
        cache = student(prompt[None], use_cache=True, logits_to_keep=1).past_key_values
    assert [layer.is_sliding for layer in cache.layers] == [False, True, False, False, True]
    assert cache.layers[3].keys.shape[2] == 40
    assert cache.layers[4].keys.shape[2] == 15  # the window less the token that comes next


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("g", [1, 2])
def test_calibration_improves_every_family(name: str, g: int) -> None:
    tokens = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(1))

    def error(calibration: Any) -> float:
        student = convert(make_teacher(name), num_key_value_layers=3, key_value_group_size=g, calibration=calibration)
        with torch.no_grad():
            difference = student(tokens[24:]).logits - student.swiftkv(False)(tokens[24:]).logits
        return float(difference.norm())

    assert error(tokens[:24].split(8)) < error(None)
