"""vLLM behind `/generate` and related routes, and the requests that it refuses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.vllm_engine import validate_vllm_params
from tests.contract.serving.generate import *  # noqa: F403


@pytest.mark.parametrize(
    ("path", "option", "field"),
    [
        ("/generate", {"num_lookup_tokens": 4}, "num_lookup_tokens"),
        ("/generate", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"echo": True, "logprobs": 1}, "logprobs"),
    ],
)
async def test_what_the_native_engine_alone_has_is_refused_by_name(
    client: httpx.AsyncClient, path: str, option: dict[str, Any], field: str
) -> None:
    named = {} if path == "/generate" else {"model": "mdl_1"}
    response = await client.post(path, json={**named, "prompt": [1, 2], **option})
    assert response.status_code == (400 if named else 422)
    refused = response.json()
    error = refused["error"] if named else {"param": refused["errors"][0]["field"], "message": refused["detail"]}
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is ")
    assert "only engine.backend: native supports it" in error["message"]


@pytest.mark.parametrize("early_exit", ["lossless", {"mode": "threshold", "threshold": 0.5}])
def test_a_students_exit_head_is_refused_by_name(early_exit: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"only engine\.backend: native supports it") as caught:
        validate_vllm_params(SamplingParams(early_exit=early_exit), skips_prompts=True)
    assert caught.value.field == "early_exit"
