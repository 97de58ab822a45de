"""Options out of range are refused with field, value and what is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.engine import EngineConfig, SamplingParams
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_TOKEN_IDS, MAX_STOPS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", "much"),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", [1]),
        ("n", 0),
        ("logprobs", -1),
        ("prompt_logprobs", 101),
        ("seed", -1),
        ("seed", 1 << 63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 7),
        ("ignore_eos", "yes"),
        ("include_stop_str_in_output", 1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
    ],
)
def test_sampling_params_name_what_they_refuse(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert f"{field} is {value!r}; it must be " in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "has", "accepts"),
    [
        ("stop", ["x"] * (MAX_STOPS + 1), f"{MAX_STOPS + 1} entries", MAX_STOPS),
        ("stop", "x" * (MAX_STOP_LENGTH + 1), f"{MAX_STOP_LENGTH + 1} characters", MAX_STOP_LENGTH),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), f"{MAX_STOP_TOKEN_IDS + 1} entries", MAX_STOP_TOKEN_IDS),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), f"{MAX_LOGIT_BIAS + 1} entries", MAX_LOGIT_BIAS),
    ],
    ids=["stops", "stop length", "stop token ids", "logit bias"],
)
def test_what_is_too_much_is_refused_by_its_number(field: str, value: Any, has: str, accepts: int) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert has in caught.value.message
    assert str(accepts) in caught.value.message
    assert len(caught.value.message) < 200


def test_stop_may_be_one_string_or_a_list() -> None:
    assert SamplingParams(stop="x").stop == ("x",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"blocksize": 16}, {"dtype": "int8"}, {"max_model_len": 1}, {"num_threads": 0}])
def test_engine_config_refuses_unknown_keys_and_values(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        EngineConfig(**options)
