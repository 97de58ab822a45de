"""Versions of a replica: swapped between requests, with chat templates of their own, and two at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import ValidationError

from swiftkv_platform.engine import AsyncLLMEngine, LLMEngine, SamplingParams
from swiftkv_platform.errors import EngineDeadError, InvalidInputError, ModelError
from swiftkv_platform.model import convert
from swiftkv_platform.serve.args import ReplicaArgs, ServedConfig
from swiftkv_platform.serve.chat import render_chat
from swiftkv_platform.serve.collector import RequestContext
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState
from swiftkv_platform.serve.versions import VersionSwapper, load_version
from tests.contract.serving.replicas import asgi_client, version_of
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.parameters import few
from tests.unit.engine.tiny_models import make_model, save_swiftkv

pytestmark = pytest.mark.slow("loads models")

ARGS = ReplicaArgs(id="dep_1")
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
LONG = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
BRIEF = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
COMMAND = "{{ cycler.__init__.__globals__.os.popen('touch %s').read() }}"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hé"}]


def document(model: str, **changes: Any) -> dict[str, Any]:
    """Configuration that serves `model`. Its artifact exists only if `changes` names one: `Loader` reads none."""
    return {"model": model, "artifact_uri": "unused", "revision": f"rev-{model}", "verify": False, **changes}


async def load(served: ServedConfig) -> ModelVersion:
    return await load_version(ARGS, served)


async def swapped(current: ReplicaState, revision: str) -> None:
    while current.swap.status == "loading" or current.swap.revision != revision:
        await asyncio.sleep(0.001)


def counted(current: ReplicaState, name: str) -> float:
    lines = current.metrics.render_page().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"swiftkv:{name} ")), 0.0)


def client_of(current: ReplicaState) -> httpx.AsyncClient:
    return asgi_client(create_http_app(current))


@pytest_asyncio.fixture(loop_scope="module")
async def current() -> AsyncIterator[ReplicaState]:
    current = ReplicaState()
    yield current
    await current.version.drain()


class Loader:
    """Loads models once `may_load` is set. The model `bad` cannot be loaded."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.loaded: dict[str, ModelVersion] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, served: ServedConfig) -> ModelVersion:
        await self.may_load.wait()
        if served.model == "bad":
            raise ModelError("it is bad")
        engine = AsyncLLMEngine(LLMEngine.from_pretrained(self.model_dir, served.engine))
        self.loaded[served.model] = version_of(engine, served.model)
        return self.loaded[served.model]

    def is_closed(self, model: str) -> bool:
        try:
            self.loaded[model].engine.check_health()
        except EngineDeadError:
            return True
        return False


@pytest_asyncio.fixture(loop_scope="module")
async def loader(model_dir: Path) -> Loader:
    return Loader(model_dir)


@pytest_asyncio.fixture(loop_scope="module")
async def swaps(current: ReplicaState, loader: Loader) -> VersionSwapper:
    """Swaps of a replica that serves the model `one`."""
    swaps = VersionSwapper(current, loader.load)
    await swaps.request_version(document("one"))
    return swaps


async def test_running_requests_finish_on_the_old_version_which_is_then_closed(
    current: ReplicaState, loader: Loader, swaps: VersionSwapper
) -> None:
    async with current.acquire_version() as version:
        answers = await current.submit(version, [[1, 2]], LONG, RequestContext(interval_s=0.0))
    outputs = answers.stream_outputs()
    await anext(outputs)
    async with current.acquire_version() as undecided:
        await swaps.request_version(document("two"))
        assert current.version.model_info.model == "one", "the old one serves while the new one loads"
        await swapped(current, "rev-two")
        assert current.version.model_info.model == "two"
        *_, (_, last) = [item async for item in outputs]
        assert (len(last.token_ids), last.finish_reason) == (50, "length")
        late = await current.submit(undecided, [[3]], LONG, RequestContext())
    assert len((await late.collect())[0].token_ids) == 50, "it chose its version before the swap"
    while not loader.is_closed("one"):
        await asyncio.sleep(0.01)
    assert not loader.is_closed("two")
    assert counted(current, 'swaps_total{outcome="succeeded"}') == 1


@pytest.mark.parametrize("bad", few([{}, {"colour": "red"}, {"engine": {"dtype": 8}}], [{}]))
async def test_a_bad_version_is_refused_and_the_old_one_stays(
    current: ReplicaState, loader: Loader, swaps: VersionSwapper, bad: dict[str, Any]
) -> None:
    await swaps.request_version(document("bad", **bad))
    await swapped(current, "rev-bad")
    assert (current.swap.status, current.version.model_info.model) == ("refused", "one")
    assert current.swap.message
    assert counted(current, 'swaps_total{outcome="refused"}') == 1
    await swaps.request_version(document("one"))
    await swapped(current, "rev-one")
    assert current.swap.status == "done"
    assert current.version is loader.loaded["one"], "the version that is served is not loaded again"


async def test_capture_counts_at_once_for_both_models_and_loads_nothing(
    current: ReplicaState, swaps: VersionSwapper, tmp_path: Path
) -> None:
    before = current.version
    before.candidate = version_of(before.engine, "two")
    settings = {"share": 1.0, "uri": str(tmp_path), "redact": ["email"]}
    for number, capture in enumerate((settings, {**settings, "share": 0.0}, None)):
        await swaps.request_version(document("one", revision=f"r{number}", capture=capture))
        await swapped(current, f"r{number}")
        assert current.version is before
        for version in (before, before.candidate):
            assert version is not None
            plan = version.plan_capture("/generate", allows_capture=True, user="ann")
            assert (plan is not None) == (number == 0)
            assert version.plan_capture("/generate", allows_capture=False, user=None) is None
    before.candidate = None  # has the same engine


@pytest.mark.parametrize(
    ("field", "good", "bad", "read"),
    [
        ("cors_origins", "https://a.example.org", "a.example.org/x", lambda current: current.get_cors_origins()),
        ("ignored_fields", "suffix", "no field", lambda current: current.version.ignored_fields),
    ],
)
async def test_fields_of_the_door_count_at_once_and_load_nothing(
    current: ReplicaState,
    swaps: VersionSwapper,
    field: str,
    good: str,
    bad: str,
    read: Callable[[ReplicaState], frozenset[str]],
) -> None:
    before = current.version
    for values in ([good, "*"], None):
        await swaps.request_version(document("one", revision=str(values), **{field: values}))
        await swapped(current, str(values))
        assert current.version is before
        assert read(current) == frozenset(values or ())
    await swaps.request_version(document("one", revision="bad", **{field: [bad]}))
    await swapped(current, "bad")
    assert current.swap.status == "refused"


@pytest.mark.soak("loads several versions")
async def test_the_last_wanted_version_wins(current: ReplicaState, loader: Loader, swaps: VersionSwapper) -> None:
    loader.may_load.clear()
    for model in ("two", "three", "bad", "four"):
        await swaps.request_version(document(model))
        await asyncio.sleep(0)
    loader.may_load.set()
    await swapped(current, "rev-four")
    assert current.version.model_info.model == "four"
    assert set(loader.loaded) == {"one", "two", "four"}, "a superseded version is not loaded"
    assert counted(current, 'swaps_total{outcome="superseded"}') == 1
    assert loader.is_closed("two")


async def test_a_first_version_that_cannot_be_served_is_an_error(loader: Loader) -> None:
    current = ReplicaState()
    with pytest.raises(ModelError, match="it is bad"):
        await VersionSwapper(current, loader.load).request_version(document("bad"))
    assert current.has_no_model


async def ask(current: ReplicaState) -> httpx.Response:
    body = {"model": "tiny", "messages": USER, "max_tokens": 1}
    return await client_of(current).post("/v1/chat/completions", json=body)


@pytest.mark.soak("loads several versions")
async def test_a_deployments_template_is_swapped_in_and_out_and_runs_no_command(
    current: ReplicaState, model_dir: Path, tmp_path: Path
) -> None:
    swaps = VersionSwapper(current, load)

    async def answer_with(template: str | None) -> httpx.Response:
        wanted = document("tiny", artifact_uri=str(model_dir), revision=str(template), chat_template=template)
        await swaps.request_version(wanted)
        await swapped(current, str(template))
        return await ask(current)

    assert "need a chat template, which this model does not have" in (await answer_with(None)).text
    for template, num_prompt_tokens in ((BRIEF, len("u:hé;".encode())), ("{{ messages[0].content }}", 3)):
        assert (await answer_with(template)).json()["usage"]["prompt_tokens"] == num_prompt_tokens
    assert (await answer_with("{% for")).status_code == 200, "the previous version goes on serving"
    assert current.swap.status == "refused"
    assert "chat_template is not a valid Jinja template: line 1" in current.swap.message
    response = await answer_with(COMMAND % (tmp_path / "marker"))
    assert response.status_code == 400
    assert "do not fit the model's chat template" in response.json()["error"]["message"]
    assert not (tmp_path / "marker").exists()


@pytest.mark.soak("a second model")
async def test_a_candidate_has_the_template_too(current: ReplicaState, model_dir: Path) -> None:
    candidate = {"model": "other", "artifact_uri": str(model_dir)}
    fields = {"chat_template": BRIEF, "candidate": candidate, "tool_call_parser": "mistral"}
    await VersionSwapper(current, load).request_version(document("tiny", artifact_uri=str(model_dir), **fields))
    for version in (current.version, current.version.candidate):
        assert (version.tokenizer.chat_template, version.tool_call_parser) == (BRIEF, "mistral")


async def test_a_template_needs_a_tokenizer(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no tokenizer") as caught:
        await load(ServedConfig.model_validate(document("tiny", artifact_uri=str(tmp_path), chat_template=BRIEF)))
    assert caught.value.field == "chat_template"


def test_a_template_is_told_what_it_knows() -> None:
    told: list[dict[str, Any]] = [{"role": "developer", "content": "a"}]
    told += [{"role": "assistant", "content": None, "tool_calls": []}]
    for template, expected in ((BRIEF, "s:a;a:;"), (BRIEF + "{# developer #}", "d:a;a:;")):
        tokenizer = byte_tokenizer(chat_template=template)
        assert tokenizer.decode(render_chat(tokenizer, told)) == expected


def test_of_several_templates_one_is_for_tools_and_one_the_default() -> None:
    tokenizer = byte_tokenizer(chat_template={"default": "plain", "tool_use": "tools"})
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.decode(render_chat(tokenizer, USER)) == "plain"
    assert tokenizer.decode(render_chat(tokenizer, USER, tools=[tool])) == "tools"
    tokenizer.chat_template = {"rag": "plain"}
    with pytest.raises(InvalidInputError, match="default chat template"):
        render_chat(tokenizer, USER)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two students of one teacher."""
    directory = tmp_path_factory.mktemp("models")
    save_swiftkv(directory / "one")
    convert(make_model(), num_key_value_layers=3, key_value_group_size=1).save_pretrained(directory / "two")
    byte_tokenizer().save_pretrained(directory / "two")
    return {name: str(directory / name) for name in ("one", "two")}


def served(paths: dict[str, str], share: float | None = None, **options: Any) -> dict[str, Any]:
    """Configuration that serves `one` and, if `share` is given, `two` as its candidate."""
    candidate = {"model": "two", "artifact_uri": paths["two"], "share": share}
    options |= {} if share is None else {"candidate": candidate}
    return document("one", artifact_uri=paths["one"], **options)


async def serve(current: ReplicaState, wanted: dict[str, Any]) -> Any:
    """Serve `wanted`; return the version that does."""
    await VersionSwapper(current, load).request_version(wanted)
    return current.version


async def test_a_candidate_answers_its_share_under_its_own_name(current: ReplicaState, paths: dict[str, str]) -> None:
    version, client = await serve(current, served(paths, 0.0)), client_of(current)

    async def models() -> set[str]:
        bodies = [{"model": name, "prompt": [1, 2], **GREEDY} for name in ("one", "two") * 10]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return {answer.raise_for_status().json()["model"] for answer in answers}

    assert await models() == {"one"}
    version.candidate_share = 1.0
    assert await models() == {"two"}
    version.candidate_share = 0.5
    assert {model for _ in range(3) for model in await models()} == {"one", "two"}
    health = (await client.get("/health")).json()
    assert (health["model"], health["candidate"]["model"], health["candidate"]["share"]) == ("one", "two", 0.5)
    assert (await client.post("/v1/completions", json={"model": "three", "prompt": "a"})).status_code == 404
    assert sum(counted(current, f'requests_total{{model="{model}"}}') for model in ("one", "two")) == 100


async def test_another_share_loads_nothing(current: ReplicaState, paths: dict[str, str]) -> None:
    swaps = VersionSwapper(current, load)
    await swaps.request_version(served(paths, 0.1))
    version: Any = current.version
    await swaps.request_version(served(paths, 0.9, ignored_fields=["suffix"], revision="more"))
    await swapped(current, "more")
    assert current.version is version
    assert version.candidate_share == 0.9
    assert version.ignored_fields == version.candidate.ignored_fields == {"suffix"}


def test_a_share_above_one_is_refused(paths: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"candidate\.share"):
        ServedConfig.model_validate(served(paths, 1.1))
