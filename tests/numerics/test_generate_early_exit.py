"""Threshold early exit in `generate()`: the rows that exit, the token's origin, and no effect on other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.early_exit import EarlyExit
from tests.numerics import test_generate as base
from tests.numerics.test_generate import ARGUMENTS, SAMPLING, generate, tokens_by_layer


def make_student(name: str = "llama", **arguments: Any) -> Any:
    """Its exit head is the teacher's own head, sharpened, so that its confidence varies."""
    student = base.make_student(name, **({"early_exit": True} | arguments))
    if student.config.early_exit:
        with torch.no_grad():
            student.exit_head.weight.mul_(4)
    return student


@pytest.fixture(scope="module", params=["llama", "mistral"])
def student(request: pytest.FixtureRequest) -> Any:
    return make_student(request.param)


@pytest.fixture
def prompts() -> torch.Tensor:
    return torch.randint(0, 256, (4, 40), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def mixed(model: Any, prompts: torch.Tensor) -> dict[str, Any]:
    """Exits with a threshold that half of the rows reach at their first token."""
    x = model.model.lower(model.model.begin(prompts))[:, -1]
    confidence = model.exit_logits(x).softmax(-1).amax(-1).sort().values
    middle = len(prompts) // 2
    return {"mode": "threshold", "threshold": float(confidence[middle - 1 : middle + 1].mean())}


def with_exits(model: Any, prompts: torch.Tensor, early_exit: Any, **arguments: Any) -> Any:
    return generate(model, prompts, early_exit=early_exit, return_dict_in_generate=True, **arguments)


@torch.no_grad()
def by_hand(model: Any, prompt: torch.Tensor, threshold: float, count: int) -> tuple[list[int], int]:
    """Greedy tokens and exits from full forward passes without a cache: exit logits from x, or the model's."""
    ids, num_exited = prompt.tolist(), 0
    for _ in range(count):
        tokens = torch.tensor([ids])
        x = model.model.lower(model.model.begin(tokens))[0, -1]
        logits = model.exit_logits(x)
        if logits.softmax(-1).max() >= threshold:
            num_exited += 1
        else:
            logits = model(tokens, use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], num_exited


@pytest.mark.parametrize("threshold", [0.0, "mixed", 1.0])
def test_rows_exit_as_if_each_were_alone(threshold: Any, student: Any, prompts: torch.Tensor) -> None:
    threshold = mixed(student, prompts)["threshold"] if threshold == "mixed" else threshold
    output = with_exits(student, prompts, EarlyExit("threshold", threshold))
    for row, prompt in enumerate(prompts):
        tokens, num_exited = by_hand(student, prompt, threshold, ARGUMENTS["max_new_tokens"])
        assert output.sequences[row, 40:].tolist() == tokens
        assert output.num_exited_tokens[row] == num_exited
    assert len(output.past_key_values.layers) == 4


def test_rows_of_a_step_part(student: Any, prompts: torch.Tensor) -> None:
    """Premise of the other tests; the first token may exit, too."""
    options = mixed(student, prompts)
    assert int(with_exits(student, prompts, options, max_new_tokens=1).num_exited_tokens.sum()) == 2
    exited = with_exits(student, prompts, options).num_exited_tokens
    assert 2 < int(exited.sum()) < exited.numel() * ARGUMENTS["max_new_tokens"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 7},
        {"repetition_penalty": 1.4, "use_cache": False},
        {**SAMPLING, "use_cache": False},
        {**SAMPLING, "num_return_sequences": 2, "use_cache": False},
    ],
)
def test_other_options_go_along(arguments: dict[str, Any], student: Any, prompts: torch.Tensor) -> None:
    options = mixed(student, prompts)
    expected = with_exits(student, prompts, options, **arguments)
    cached = {name: value for name, value in arguments.items() if name in SAMPLING or name.startswith(("rep", "num"))}
    actual = with_exits(student, prompts, options, **cached)
    assert torch.equal(actual.sequences, expected.sequences)
    assert torch.equal(actual.num_exited_tokens, expected.num_exited_tokens)
    assert torch.equal(generate(student, prompts, early_exit=options, **cached), expected.sequences)


def test_left_padded_rows_exit_as_if_alone(student: Any, prompts: torch.Tensor) -> None:
    mask = torch.ones_like(prompts)
    mask[0, :13] = 0
    options = mixed(student, prompts)
    output = with_exits(student, prompts, options, attention_mask=mask)
    tokens, num_exited = by_hand(student, prompts[0, 13:], options["threshold"], ARGUMENTS["max_new_tokens"])
    assert output.sequences[0, 40:].tolist() == tokens
    assert output.num_exited_tokens[0] == num_exited


def test_scores_are_those_of_the_head_that_chose(student: Any, prompts: torch.Tensor) -> None:
    options = mixed(student, prompts)
    output = with_exits(student, prompts, options, output_logits=True, max_new_tokens=1)
    always = with_exits(student, prompts, {"mode": "threshold", "threshold": 0}, output_logits=True, max_new_tokens=1)
    with torch.no_grad():
        x = student.model.lower(student.model.begin(prompts))[:, -1]
        exit_logits, logits = student.exit_logits(x), student(prompts).logits[:, -1]
    exited = exit_logits.softmax(-1).amax(-1) >= options["threshold"]
    expected = torch.where(exited[:, None], exit_logits, logits)
    torch.testing.assert_close(output.logits[0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(always.logits[0], exit_logits, atol=1e-5, rtol=1e-5)


def test_exited_rows_do_not_enter_the_upper_layers(prompts: torch.Tensor) -> None:
    student = make_student()
    options = mixed(student, prompts)
    with tokens_by_layer(student) as counts:
        output = with_exits(student, prompts, {"mode": "threshold", "threshold": 0.0}, max_new_tokens=3)
    assert counts == {i: [160, 4, 4] for i in range(2)}
    assert output.num_exited_tokens.tolist() == [3, 3, 3, 3]
    with tokens_by_layer(student) as counts:
        output = with_exits(student, prompts, options)
    assert [sum(counts[i]) for i in range(2, 5)] == [4 * 10 - int(output.num_exited_tokens.sum())] * 3
    with tokens_by_layer(student) as counts:
        generate(student, prompts, early_exit="off", max_new_tokens=1)
    assert counts == {i: [160] if i < 2 else [4] for i in range(5)}


def test_tokens_after_a_row_has_ended_do_not_count(prompts: torch.Tensor) -> None:
    student = make_student()
    always = {"mode": "threshold", "threshold": 0.0}
    tokens = with_exits(student, prompts, always).sequences[:, 40:]
    eos = int(tokens[0, 2])
    output = with_exits(student, prompts, always, eos_token_id=eos)
    lengths = [row.tolist().index(eos) + 1 if eos in row else len(row) for row in tokens]
    assert lengths[0] <= 3 < max(lengths)
    assert output.num_exited_tokens.tolist() == lengths


def test_the_cache_after_exits_serves_the_next_turn(student: Any, prompts: torch.Tensor) -> None:
    """An exited token has written the keys and values of every cache layer."""
    first = with_exits(student, prompts, {"mode": "threshold", "threshold": 0.0})
    tokens = torch.cat((first.sequences, prompts[:, :9]), dim=1)
    second = generate(student, tokens, past_key_values=first.past_key_values)
    assert torch.equal(second, generate(student, tokens, use_cache=False))


def test_quantised_rows_exit_too(student: Any, prompts: torch.Tensor) -> None:
    options = mixed(student, prompts)
    output = with_exits(student, prompts, options, kv_cache_dtype="int8")
    for row in range(len(prompts)):
        alone = with_exits(student, prompts[row : row + 1], options, kv_cache_dtype="int8")
        assert torch.equal(alone.sequences[0], output.sequences[row])
        assert torch.equal(alone.num_exited_tokens[0], output.num_exited_tokens[row])


def test_the_generation_configuration_may_ask_for_it(prompts: torch.Tensor) -> None:
    student = make_student()
    options = mixed(student, prompts)
    expected = with_exits(student, prompts, options)
    student.generation_config = GenerationConfig(early_exit=options)
    assert torch.equal(generate(student, prompts), expected.sequences)
    off = generate(student, prompts, early_exit="off", return_dict_in_generate=True)
    assert not hasattr(off, "num_exited_tokens")


@pytest.mark.parametrize(
    ("early_exit", "arguments", "message"),
    [
        ("lossless", {}, "swiftkv_platform.engine"),
        ({"mode": "threshold", "threshold": 1.5}, {}, "from 0 to 1"),
        ("sometimes", {}, "off, threshold or lossless"),
        ("threshold", {"num_beams": 2}, "beam_search"),
        ("threshold", {"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ("threshold", {"output_hidden_states": True}, "one or the other"),
    ],
)
def test_refusals(early_exit: Any, arguments: dict[str, Any], message: str, prompts: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        generate(make_student(), prompts[:1], early_exit=early_exit, **arguments)
    assert str(caught.value.field).startswith("early_exit")


def test_a_model_without_exit_head_and_the_teacher_refuse(prompts: torch.Tensor) -> None:
    with pytest.raises(InvalidInputError, match="convert it with early_exit=True"):
        generate(make_student(early_exit=False), prompts, early_exit="threshold")
    with pytest.raises(InvalidInputError, match=r"model\.swiftkv\(True\)"):
        generate(make_student().swiftkv(False), prompts, early_exit="threshold")


def test_a_backend_that_cannot_drop_rows_refuses(prompts: torch.Tensor) -> None:
    student = make_student()
    student.set_attn_implementation("flex_attention")
    with pytest.raises(InvalidInputError, match="eager, sdpa or flash"):
        generate(student, prompts, early_exit="threshold")
