"""Chat templates of deployments, and messages in the words of templates that know less."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.serve.args import ReplicaArgs, Served
from swiftkv_platform.serve.chat import render_chat
from swiftkv_platform.serve.current import Current
from swiftkv_platform.serve.deployment import load_version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.swaps import Swaps
from tests.fakes.tokenizers import byte_tokenizer
from tests.unit.engine.tiny_models import make_model, save_swiftkv

ARGS = ReplicaArgs(id="dep_1")
BRIEF = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
COMMAND = "{{ cycler.__init__.__globals__.os.popen('touch %s').read() }}"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_swiftkv(tmp_path_factory.mktemp("swiftkv")))


def served(model_dir: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "artifact_uri": model_dir, "verify": False, **options}


@pytest_asyncio.fixture
async def current() -> AsyncIterator[Current]:
    current = Current()
    yield current
    await current.version.drain()


async def ask(current: Current) -> httpx.Response:
    transport = httpx.ASGITransport(create_http_app(current))
    async with httpx.AsyncClient(transport=transport, base_url="http://serve") as client:
        body = {"model": "tiny", "messages": USER, "max_tokens": 1}
        return await client.post("/v1/chat/completions", json=body)


async def test_a_deployments_template_is_swapped_in_and_out(current: Current, model_dir: str) -> None:
    swaps = Swaps(current, lambda served: load_version(ARGS, served))
    await swaps.want(served(model_dir))
    assert "need a chat template, which this model has not" in (await ask(current)).text
    for template, num_prompt_tokens in ((BRIEF, len("u:hé;".encode())), ("{{ messages[0].content }}", 3)):
        await swaps.want(served(model_dir, chat_template=template))
        await swaps._catching_up  # type: ignore[misc]
        assert (await ask(current)).json()["usage"]["prompt_tokens"] == num_prompt_tokens
    await swaps.want(served(model_dir, chat_template="{% for"))
    await swaps._catching_up  # type: ignore[misc]
    assert current.swap.status == "refused"
    assert "chat_template is no Jinja template: line 1" in current.swap.message
    assert (await ask(current)).status_code == 200, "the version before serves on"


async def test_a_candidate_has_the_template_too(current: Current, model_dir: str) -> None:
    candidate = {"model": "other", "artifact_uri": model_dir}
    document = served(model_dir, chat_template=BRIEF, candidate=candidate, tool_call_parser="mistral")
    await Swaps(current, lambda served: load_version(ARGS, served)).want(document)
    assert current.version.candidate is not None
    for version in (current.version, current.version.candidate):
        assert version.tokenizer.chat_template == BRIEF
        assert version.tool_call_parser == "mistral"


async def test_a_template_needs_a_tokenizer(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no tokenizer") as caught:
        await load_version(ARGS, Served.model_validate(served(str(tmp_path), chat_template=BRIEF)))
    assert caught.value.field == "chat_template"


async def test_a_template_runs_no_command(current: Current, model_dir: str, tmp_path: Path) -> None:
    document = served(model_dir, chat_template=COMMAND % (tmp_path / "marker"))
    await Swaps(current, lambda served: load_version(ARGS, served)).want(document)
    response = await ask(current)
    assert response.status_code == 400
    assert "do not fit the model's chat template" in response.json()["error"]["message"]
    assert not (tmp_path / "marker").exists()


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = byte_tokenizer(chat_template=template)
    text: str = tokenizer.decode(render_chat(tokenizer, messages))
    return text


def test_a_template_is_told_what_it_knows() -> None:
    told: list[dict[str, Any]] = [
        {"role": "developer", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert rendered(BRIEF, told) == "s:a;a:;"
    assert rendered(BRIEF + "{# developer #}", told) == "d:a;a:;"


def test_of_several_templates_one_is_for_tools_and_one_the_default() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.decode(render_chat(tokenizer, USER)) == "plain"
    assert tokenizer.decode(render_chat(tokenizer, USER, tools=[tool])) == "tools"
    tokenizer.chat_template = {"rag": "plain"}
    with pytest.raises(InvalidInputError, match="default chat template"):
        render_chat(tokenizer, USER)
