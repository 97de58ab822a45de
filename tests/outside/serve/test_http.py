"""vLLM behind `/generate` and related routes, and the requests that it refuses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.contract.serving.generate import *  # noqa: F403
from tests.contract.serving.generate import post


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ({"early_exit": "lossless"}, "early_exit"),
        ({"early_exit": {"mode": "threshold", "threshold": 0.5}}, "early_exit"),
        ({"num_lookup_tokens": 4}, "num_lookup_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_the_native_engine_alone_has_is_refused_by_name(
    client: httpx.AsyncClient, option: dict[str, Any], field: str
) -> None:
    response = await post(client, prompt=[1, 2], **option)
    [error] = response.json()["errors"]
    assert (response.status_code, error["field"]) == (422, field)
    assert "only engine.backend: native supports it" in error["message"]
