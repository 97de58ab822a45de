"""Sampling, early exit and engine options: spellings, and refusals with field, value and what is accepted."""

from math import inf, nan
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.engine import EngineConfig, SamplingParams
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from swiftkv_platform.specs.sampling import EarlyExit

REFUSED: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, True],
    "temperature": [-0.1, 2.01, nan, inf, "hot"],
    "top_p": [-0.01, 1.01],
    "top_k": [-2, 1 << 31],
    "min_p": [1.5],
    "repetition_penalty": [0.0, 1e-39, 1e39],
    "presence_penalty": [nan, 2.5, 1e39],
    "frequency_penalty": ["much", -2.5],
    "logit_bias": [{"a": 1.0}, {1: inf}, {1: -101.0}, [1]],
    "n": [0],
    "logprobs": [-1],
    "prompt_logprobs": [101],
    "seed": [~(1 << 63), 1 << 63],
    "stop": ["", ["a", ""], 3],
    "stop_token_ids": [[-1], 7],
    "allowed_token_ids": [[], [-1], 7],
    "ignore_eos": ["yes"],
    "include_stop_str_in_output": [1],
    "min_tokens": [-1, 17],
    "truncate_prompt_tokens": [0, -2],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
def test_sampling_params_name_what_they_refuse(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert f"{field} is {value!r}; it must be " in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "unit", "most"),
    [
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1), "entries", MAX_STOP_STRINGS),
        ("stop", "x" * (MAX_STOP_LENGTH + 1), "characters", MAX_STOP_LENGTH),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), "entries", MAX_STOP_TOKEN_IDS),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), "entries", MAX_LOGIT_BIAS),
    ],
    ids=["stops", "stop length", "stop token ids", "logit bias"],
)
def test_what_is_too_much_is_refused_by_its_number(field: str, value: Any, unit: str, most: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"{most + 1} {unit}.*{most}") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert len(caught.value.message) < 200


def test_stop_may_be_one_string_or_a_list() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")


@pytest.mark.parametrize("options", [{"blocksize": 16}, {"dtype": "int8"}, {"max_model_len": 1}, {"num_threads": 0}])
def test_engine_config_refuses_unknown_keys_and_values(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        (None, EarlyExit("off", 0.95, 4)),
        ("threshold", EarlyExit("threshold", 0.95, 4)),
        ({"mode": "lossless", "num_draft_tokens": 2}, EarlyExit("lossless", 0.0, 2)),
        ({"mode": "lossless", "threshold": 0.7}, EarlyExit("lossless", 0.7, 4)),
        ({"mode": "threshold", "threshold": 1}, EarlyExit("threshold", 1.0, 4)),
        (EarlyExit("threshold", 0.0), EarlyExit("threshold", 0.0, 4)),
    ],
)
def test_spellings_of_early_exit(spelling: Any, meaning: EarlyExit) -> None:
    assert EarlyExit.parse(spelling) == meaning


@pytest.mark.parametrize(
    ("spelling", "field", "accepted"),
    [
        ("always", "early_exit.mode", "off, threshold or lossless"),
        *[
            ({"mode": "threshold", "threshold": value}, "early_exit.threshold", "from 0 to 1")
            for value in (1.01, -0.1, nan, "0.9", True)
        ],
        ({"mode": "lossless", "num_draft_tokens": 0}, "early_exit.num_draft_tokens", "at least 1"),
        ({"modes": "threshold"}, "early_exit", "num_draft_tokens"),
        (0.9, "early_exit", "threshold"),
    ],
)
def test_refusals_of_early_exit_name_the_field_and_what_is_accepted(spelling: Any, field: str, accepted: str) -> None:
    with pytest.raises(InvalidInputError, match=accepted) as caught:
        EarlyExit.parse(spelling)
    assert caught.value.field == field
