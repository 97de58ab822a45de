"""Threshold early exit in `generate()`: the rows that exit, where each token comes from, and no effect on other
rows."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.sampling import EarlyExit
from tests.numerics import test_generate as base
from tests.numerics.test_generate import ARGUMENTS, CACHES, SAMPLING, generate, students, tokens_by_layer
from tests.support.tiny_models import random_tokens


def make_student(name: str = "llama", **arguments: Any) -> Any:
    """Return a student whose exit head is the teacher's head, sharpened, so that its confidence varies."""
    student = base.make_student(name, **({"early_exit": True} | arguments))
    if student.config.early_exit:
        with torch.no_grad():
            student.exit_head.weight.mul_(4)
    return student


@pytest.fixture(scope="module")
def student(request: pytest.FixtureRequest) -> Any:
    return make_student(getattr(request, "param", "llama"))


@pytest.fixture
def prompts() -> torch.Tensor:
    return random_tokens(4, 40)


@torch.no_grad()
def mixed(model: Any, prompts: torch.Tensor) -> dict[str, Any]:
    """Return early-exit settings with a threshold that half of the rows reach at their first token."""
    x = model.model.run_lower_layers(model.model.make_context(prompts))[:, -1]
    confidence = model.exit_logits(x).softmax(-1).amax(-1).sort().values
    middle = len(prompts) // 2
    return {"mode": "threshold", "threshold": float(confidence[middle - 1 : middle + 1].mean())}


def with_exits(model: Any, prompts: torch.Tensor, early_exit: Any, **arguments: Any) -> Any:
    return generate(model, prompts, early_exit=early_exit, return_dict_in_generate=True, **arguments)


@torch.no_grad()
def by_hand(model: Any, prompt: torch.Tensor, threshold: float, count: int) -> tuple[list[int], int]:
    """Decode greedily by full forward passes without a cache; return the tokens and the number of exits."""
    ids, num_exited = prompt.tolist(), 0
    for _ in range(count):
        tokens = torch.tensor([ids])
        x = model.model.run_lower_layers(model.model.make_context(tokens))[0, -1]
        logits = model.exit_logits(x)
        if logits.softmax(-1).max() >= threshold:
            num_exited += 1
        else:
            logits = model(tokens, use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], num_exited


@students
def test_rows_exit_as_if_each_were_alone(student: Any, prompts: torch.Tensor) -> None:
    """Some rows of a step exit and others do not, from the first token on; one row is padded on the left."""
    options, mask, starts = mixed(student, prompts), torch.ones_like(prompts), (13, 0, 0, 0)
    mask[0, :13] = 0
    assert int(with_exits(student, prompts, options, max_new_tokens=1).num_exited_tokens.sum()) == 2
    for threshold in (0.0, options["threshold"], 1.0):
        output = with_exits(student, prompts, EarlyExit("threshold", threshold), attention_mask=mask)
        for row, start in enumerate(starts):
            tokens, num_exited = by_hand(student, prompts[row, start:], threshold, ARGUMENTS["max_new_tokens"])
            assert output.sequences[row, 40:].tolist() == tokens
            assert output.num_exited_tokens[row] == num_exited
        assert len(output.past_key_values.layers) == 4
        if threshold not in (0.0, 1.0):
            exited = output.num_exited_tokens
            assert 2 < int(exited.sum()) < exited.numel() * ARGUMENTS["max_new_tokens"]


@students
def test_other_options_go_along(student: Any, prompts: torch.Tensor) -> None:
    options, uncached = mixed(student, prompts), {"use_cache": False}
    chosen: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.4}, {**SAMPLING, "num_return_sequences": 2}]
    for arguments in chosen:
        expected = with_exits(student, prompts, options, **arguments)
        for cache in [uncached] if arguments else [uncached, *CACHES.values()]:
            actual = with_exits(student, prompts, options, **arguments, **cache)
            assert torch.equal(actual.sequences, expected.sequences), cache
            assert torch.equal(actual.num_exited_tokens, expected.num_exited_tokens), cache
        assert torch.equal(generate(student, prompts, early_exit=options, **arguments), expected.sequences)


@students
def test_scores_are_those_of_the_head_that_chose(student: Any, prompts: torch.Tensor) -> None:
    options = mixed(student, prompts)
    output = with_exits(student, prompts, options, output_logits=True, max_new_tokens=1)
    always = with_exits(student, prompts, {"mode": "threshold", "threshold": 0}, output_logits=True, max_new_tokens=1)
    with torch.no_grad():
        x = student.model.run_lower_layers(student.model.make_context(prompts))[:, -1]
        exit_logits, logits = student.exit_logits(x), student(prompts).logits[:, -1]
    exited = exit_logits.softmax(-1).amax(-1) >= options["threshold"]
    expected = torch.where(exited[:, None], exit_logits, logits)
    torch.testing.assert_close(output.logits[0], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(always.logits[0], exit_logits, atol=1e-5, rtol=1e-5)


def test_exited_rows_do_not_enter_the_upper_layers(student: Any, prompts: torch.Tensor) -> None:
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


def test_tokens_after_a_row_has_ended_do_not_count(student: Any, prompts: torch.Tensor) -> None:
    always = {"mode": "threshold", "threshold": 0.0}
    tokens = with_exits(student, prompts, always).sequences[:, 40:]
    eos = int(tokens[0, 2])
    output = with_exits(student, prompts, always, eos_token_id=eos)
    lengths = [row.tolist().index(eos) + 1 if eos in row else len(row) for row in tokens]
    assert lengths[0] <= 3 < max(lengths)
    assert output.num_exited_tokens.tolist() == lengths


@students
def test_the_cache_after_exits_serves_the_next_turn(student: Any, prompts: torch.Tensor) -> None:
    """An exited token writes the keys and values of every cache layer."""
    first = with_exits(student, prompts, {"mode": "threshold", "threshold": 0.0})
    tokens = torch.cat((first.sequences, prompts[:, :9]), dim=1)
    second = generate(student, tokens, past_key_values=first.past_key_values)
    assert torch.equal(second, generate(student, tokens, use_cache=False))


def test_the_generation_configuration_may_ask_for_it(prompts: torch.Tensor) -> None:
    student = make_student()
    options = mixed(student, prompts)
    expected = with_exits(student, prompts, options)
    student.generation_config = GenerationConfig(early_exit=options)
    assert torch.equal(generate(student, prompts), expected.sequences)
    off = generate(student, prompts, early_exit="off", return_dict_in_generate=True)
    assert not hasattr(off, "num_exited_tokens")


def test_refusals(student: Any, prompts: torch.Tensor) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("lossless", {}, "swiftkv_platform.engine"),
        ({"mode": "threshold", "threshold": 1.5}, {}, "from 0 to 1"),
        ("sometimes", {}, "off, threshold or lossless"),
        ("threshold", {"num_beams": 2}, "beam_search"),
        ("threshold", {"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ("threshold", {"output_hidden_states": True}, "one or the other"),
    ]
    for early_exit, arguments, message in cases:
        with pytest.raises(InvalidInputError, match=message) as caught:
            generate(student, prompts[:1], early_exit=early_exit, **arguments)
        assert str(caught.value.field).startswith("early_exit")
    other = make_student()
    with pytest.raises(InvalidInputError, match="convert it with early_exit=True"):
        generate(make_student(early_exit=False), prompts, early_exit="threshold")
    with pytest.raises(InvalidInputError, match=r"model\.swiftkv\(True\)"):
        generate(other.swiftkv(False), prompts, early_exit="threshold")
    other.swiftkv(True).set_attn_implementation("flex_attention")  # a backend that cannot drop rows
    with pytest.raises(InvalidInputError, match="eager, sdpa or flash"):
        generate(other, prompts, early_exit="threshold")
