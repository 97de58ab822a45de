"""Every route with what its OpenAPI document allows, and with what it does not: no answer of 500, and none left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.schemas import APIOperation

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.openai.fields import FIELDS
from tests.servers import serving
from tests.unit.engine.tiny_models import save_swiftkv

NUM_EXAMPLES = 500 if "SWIFTKV_SOAK" in os.environ else 25
"""Examples of each operation."""

MODEL = "mdl_1"

HANGS_AFTER_S = 60.0
"""Far more than the longest answer of the tiny model takes on a busy machine."""

ENGINE = EngineConfig(max_num_seqs=16, max_num_waiting=256, kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncLLMEngine:
    engine = LLMEngine.from_pretrained(save_swiftkv(tmp_path_factory.mktemp("swiftkv")), ENGINE)
    engine.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return AsyncLLMEngine(engine)


@pytest.fixture(scope="module")
def url(engine: AsyncLLMEngine) -> Iterator[str]:
    card = ModelCard(deployment="dep_1", model=MODEL, manifest_digest=None, swiftkv=None, max_model_len=64)
    with serving(create_http_app(Current(Version(engine, card, created=1)))) as url:
        yield url


OPERATIONS = [
    found.ok() for found in schemathesis.openapi.from_dict(create_http_app(Current()).openapi()).get_all_operations()
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_request_breaks_the_server(operation: APIOperation, url: str, engine: AsyncLLMEngine) -> None:
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy())
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL  # else OpenAI's routes answer 404, and nothing gets any further
        response = case.call(base_url=url, timeout=HANGS_AFTER_S)
        late = isinstance(case.body, dict) and case.body.get("timeout_s") is not None and response.status_code == 504
        assert response.status_code < 500 or late, response.text
        if response.status_code in (400, 422):
            check_names_a_field(case, response.json())
        engine.check_health()

    ask()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 100) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=6,
)
PARTS = [field.name.removeprefix("stream_options.") for field in FIELDS if field.name.startswith("stream_options.")]
NAMES = st.sampled_from(sorted({field.name for field in FIELDS} - {"model", "prompt", "messages"}))
PROMPTS = {
    "completions": {"prompt": "hello"},
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a"}]},
}


@given(
    st.sampled_from(sorted(PROMPTS)),
    st.dictionaries(NAMES | st.text(max_size=12), VALUES, min_size=1, max_size=4),
    st.none() | st.dictionaries(st.sampled_from(PARTS) | st.text(max_size=12), VALUES, max_size=3),
    st.booleans(),
)
@settings(max_examples=NUM_EXAMPLES * 4, deadline=None, database=None)
def test_any_value_of_any_field_is_answered_or_refused_by_name(
    url: str,
    engine: AsyncLLMEngine,
    route: str,
    fields: dict[str, Any],
    stream_options: dict[str, Any] | None,
    stream: bool,
) -> None:
    """Fields that OpenAI's routes serve, ignore and refuse, and others."""
    body = {"max_tokens": 2, **fields, "stream": stream, "stream_options": stream_options, **PROMPTS[route]}
    response = httpx.post(f"{url}/v1/{route}", json={**body, "model": MODEL}, timeout=HANGS_AFTER_S, trust_env=False)
    assert response.status_code in (200, 400, 403, 429) or "timeout_s" in fields, response.text
    if response.status_code == httpx.codes.BAD_REQUEST:
        assert response.json()["error"]["param"], response.text
    assert response.headers.get("x-swiftkv-ignored-fields", "").isascii()
    engine.check_health()


def check_names_a_field(case: schemathesis.Case, document: Any) -> None:
    if case.path.startswith("/v1/"):
        assert document["error"]["message"]
        assert document["error"]["param"]
    else:
        assert document["errors"], document
        assert all(error["field"] and error["message"] for error in document["errors"])
