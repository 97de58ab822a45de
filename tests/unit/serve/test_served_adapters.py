"""A replica serves adapters beside its model: loaded on demand, unloaded for memory, changed without a reload."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.model import convert, export_adapter
from swiftkv_platform.serve.args import ReplicaArgs, ServedConfig
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState
from swiftkv_platform.serve.versions import VersionSwapper, load_version
from swiftkv_platform.specs.deployment import DeploymentSpec
from tests.contract.serving.replicas import publish
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import disturb
from tests.unit.engine.tiny_models import make_model
from tests.unit.serve.test_swaps import client_of, counted, swapped

pytestmark = pytest.mark.slow("loads models")

ARGS = ReplicaArgs(id="dep_1")
PROMPT = [5, 6, 7, 8, 9, 10, 11]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
NAMES = ("one", "two", "three")


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_adapter(base: Path, directory: Path, seed: int, **shape: Any) -> Path:
    torch.manual_seed(seed)
    student = disturb(convert(base, **{"num_key_value_layers": 2, "key_value_group_size": 2} | shape))
    save(student, directory.with_name(f"{directory.name}-full"))
    export_adapter(directory.with_name(f"{directory.name}-full"), directory, base=base)
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, its published adapters, and an adapter of another base and of another shape."""
    home = tmp_path_factory.mktemp("adapters")
    save(make_model(), home / "base")
    publish(home, "base")
    for seed, name in enumerate((*NAMES, "own")):
        save_adapter(home / "base", home / name, seed)
        publish(home, name)
    save_adapter(home / "base", home / "wide", 7, num_key_value_layers=3, key_value_group_size=1)
    other = make_model()
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    save_adapter(save(other, home / "other"), home / "foreign", 8)
    for name in ("wide", "foreign"):
        publish(home, name)
    return home


@pytest.fixture(scope="module")
def texts(home: Path) -> dict[str, list[int]]:
    """Tokens that each merged model generates."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return {
        name: LLMEngine.from_pretrained(home / name, EngineConfig(kv_cache_bytes=1 << 20))
        .generate([PROMPT], params)[0]
        .token_ids
        for name in (*NAMES, "own", "base")
    }


def describe(home: Path, *names: str) -> list[dict[str, Any]]:
    """Return adapters of a replica's configuration; each is also served by its plain name."""
    return [{"model": f"mdl_{name}", "name": name, "artifact_uri": str(home / "store" / name)} for name in names]


def document(home: Path, *names: str, own: str = "own", **changes: Any) -> dict[str, Any]:
    engine = {"kv_cache_bytes": 1 << 20, **changes.pop("engine", {})}
    model = {"model": f"mdl_{own}", "artifact_uri": str(home / "store" / own)}
    return {**model, "revision": repr(names), "engine": engine, "adapters": describe(home, *names), **changes}


def get_size(home: Path, name: str) -> int:
    return sum(file.stat().st_size for file in (home / name).glob("*.safetensors"))


class Replica:
    """A replica that swaps to a new configuration as Serve tells it to."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = ReplicaState()
        self.swapper = VersionSwapper(self.state, self._load)
        self.client = client_of(self.state)

    async def _load(self, served: ServedConfig) -> ModelVersion:
        return await load_version(ARGS, served, self.state.metrics.count_load)

    async def reconfigure(self, *names: str, **changes: Any) -> None:
        wanted = document(self.home, *names, **changes)
        await self.swapper.request_version(wanted)
        await swapped(self.state, wanted["revision"])

    async def generate(self, model: str | None = None) -> list[int]:
        response = await self.client.post("/generate", json={**BODY, "model": model})
        assert response.is_success, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    @property
    def resident(self) -> set[str]:
        pool = self.state.version.adapters
        assert pool is not None
        return {str(each["name"]) for each in pool.describe() if each["resident"]}


@pytest_asyncio.fixture(loop_scope="module")
async def replica(home: Path) -> AsyncIterator[Replica]:
    replica = Replica(home)
    yield replica
    await replica.state.version.drain()


@pytest.mark.parametrize("own", ["own", "base"])
async def test_each_adapter_answers_as_its_merged_model_on_every_route(
    replica: Replica, texts: dict[str, list[int]], own: str
) -> None:
    await replica.reconfigure(*NAMES, own=own)
    assert replica.resident == set(NAMES)
    everyone = [None, f"mdl_{own}", *NAMES, *(f"mdl_{name}" for name in NAMES)]
    answers = await asyncio.gather(*map(replica.generate, everyone))
    assert answers == [texts[own]] * 2 + [texts[name] for name in NAMES] * 2
    for name in NAMES:
        body = {**BODY, "model": name, "return_token_ids": None}
        answer = (await replica.client.post("/v1/completions", json=body)).json()
        assert answer["model"] == f"mdl_{name}", "responses name the model, not the deployment's name for it"
        assert answer["choices"][0]["text"] == byte_tokenizer().decode(texts[name])
    assert counted(replica.state, 'requests_total{model="mdl_two"}') == 3
    tokens = (await replica.client.post("/tokenize", json={"prompt": "ab", "model": "two"})).json()
    assert tokens["count"] == 2


async def test_models_are_listed_and_unknown_names_refused(replica: Replica) -> None:
    await replica.reconfigure("one", "two")
    listed = (await replica.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["mdl_own", "mdl_one", "mdl_two"]
    assert (listed["first_id"], listed["last_id"]) == ("mdl_own", "mdl_two")
    assert (await replica.client.get("/v1/models/two")).json()["id"] == "mdl_two"
    served = "the served models are 'mdl_own', 'mdl_one', 'mdl_two'"
    for path, body in (("/v1/completions", BODY), ("/generate", BODY), ("/tokenize", {"prompt": "a"})):
        response = await replica.client.post(path, json={**body, "model": "three"})
        assert (response.status_code, served in response.text) == (404, True), path
    health = (await replica.client.get("/health")).json()
    assert health["adapters"][1] == {"model": "mdl_two", "name": "two", "resident": True}


async def test_adapters_that_exceed_their_memory_are_loaded_on_demand(
    replica: Replica, texts: dict[str, list[int]]
) -> None:
    limit = get_size(replica.home, "one") + get_size(replica.home, "two")
    await replica.reconfigure(*NAMES, engine={"max_adapter_bytes": limit})
    assert replica.resident == {"one", "two"}
    assert counted(replica.state, "adapters_resident") == 2
    assert await replica.generate("one") == texts["one"]
    assert await replica.generate("three") == texts["three"]
    assert replica.resident == {"one", "three"}, "the least recently used one was unloaded"
    for name in (*NAMES, *NAMES):
        assert await replica.generate(name) == texts[name]
        assert counted(replica.state, "adapter_bytes") <= limit
    answers = await asyncio.gather(*(replica.generate(name) for name in (*NAMES, None) * 4))
    assert answers == [texts[name or "own"] for name in (*NAMES, None) * 4], "none waits forever for memory"


async def test_other_requests_run_while_an_adapter_loads_and_a_busy_one_is_not_unloaded(
    replica: Replica, texts: dict[str, list[int]]
) -> None:
    await replica.reconfigure(*NAMES, engine={"max_adapter_bytes": get_size(replica.home, "one")})
    async with replica.state.acquire_version("one") as held:
        loading = asyncio.create_task(replica.generate("two"))
        assert await replica.generate() == texts["own"]
        await asyncio.sleep(0.2)
        assert not loading.done(), "it waits for the memory of a busy adapter"
        waiting = asyncio.create_task(replica.generate("one"))
        assert held.engine.num_requests == 0
    assert await loading == texts["two"]
    assert await waiting == texts["one"]


async def test_a_caller_that_leaves_does_not_interrupt_a_load(replica: Replica, texts: dict[str, list[int]]) -> None:
    await replica.reconfigure(*NAMES, engine={"max_adapter_bytes": get_size(replica.home, "one")})
    tasks = [asyncio.create_task(replica.generate("two")) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await tasks[1] == texts["two"]
    assert replica.resident == {"two"}


async def test_adapters_come_and_go_without_a_reload_or_a_failed_request(
    replica: Replica, texts: dict[str, list[int]]
) -> None:
    await replica.reconfigure("one")
    version = replica.state.version
    stop = asyncio.Event()

    async def keep_asking() -> int:
        count = 0
        while not stop.is_set():
            assert await replica.generate("one") == texts["one"]
            count += 1
        return count

    asking = asyncio.create_task(keep_asking())
    async with replica.state.acquire_version("one"):
        pass
    await replica.reconfigure("one", "two")
    assert await replica.generate("two") == texts["two"]
    running = asyncio.create_task(replica.generate("two"))
    await asyncio.sleep(0)
    await replica.reconfigure("one", "three")
    assert await running == texts["two"], "a running request of a removed adapter finishes"
    assert (await replica.client.post("/generate", json={**BODY, "model": "two"})).status_code == 404
    assert await replica.generate("three") == texts["three"]
    await replica.reconfigure("one", "two", "three", revision="again")
    assert await replica.generate("two") == texts["two"]
    stop.set()
    assert await asking > 0
    assert replica.state.version is version
    engine = version.engine.engine  # type: ignore[attr-defined]
    while len(engine.adapters) > 3:
        await asyncio.sleep(0.01)


async def test_a_request_for_an_adapter_that_is_being_added_does_not_load_it_again(
    replica: Replica, texts: dict[str, list[int]]
) -> None:
    await replica.reconfigure("one")
    version = replica.state.version
    assert version.adapters is not None
    adding = asyncio.create_task(replica.reconfigure("one", "two"))
    while version.adapters.find_model("two") is None:
        await asyncio.sleep(0)
    assert await replica.generate("two") == texts["two"]
    await adding
    assert len(version.engine.engine.adapters) == 2  # type: ignore[attr-defined]
    assert version.adapters.num_bytes == get_size(replica.home, "one") + get_size(replica.home, "two")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("foreign", "but the resident base is"),
        ("wide", "a student of the shape"),
        ("base", "no swiftkv_adapter.json"),
        ("missing", "has no manifest.json"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_nothing_changes(
    replica: Replica, texts: dict[str, list[int]], bad: str, message: str
) -> None:
    await replica.reconfigure("one")
    await replica.reconfigure("two", bad)
    assert replica.state.swap.status == "refused"
    assert message in replica.state.swap.message
    assert replica.resident == {"one"}
    assert await replica.generate("one") == texts["one"]
    assert (await replica.client.post("/generate", json={**BODY, "model": "two"})).status_code == 404


CAPTURE = {"share": 1.0, "uri": "store"}


@pytest.mark.parametrize("changes", [{"adapters": "foreign"}, {"own": "missing"}], ids=str)
async def test_capture_ends_at_once_even_if_new_models_are_refused(replica: Replica, changes: dict[str, Any]) -> None:
    await replica.reconfigure("one", capture=CAPTURE)
    refused = dict(changes)
    names = ("one", refused.pop("adapters")) if "adapters" in refused else ("one",)
    await replica.reconfigure(*names, revision="stop", **refused)
    assert replica.state.swap.status == "refused"
    for model in (None, "one"):
        async with replica.state.acquire_version(model) as version:
            assert version.capture is None, model


async def test_new_settings_do_not_wait_for_adapters_that_are_not_resident(replica: Replica, tmp_path: Path) -> None:
    adapters = describe(replica.home, "one", "two")
    store = shutil.copytree(replica.home / "store" / "two", tmp_path / "two")
    adapters[1]["artifact_uri"] = str(store)
    limit = {"max_adapter_bytes": get_size(replica.home, "one")}
    await replica.reconfigure(adapters=adapters, engine=limit, capture=CAPTURE)
    assert replica.resident == {"one"}
    shutil.rmtree(store)
    await replica.reconfigure(adapters=adapters, engine=limit, revision="stop")
    assert replica.state.swap.status == "done", replica.state.swap.message


async def test_a_swap_of_the_model_takes_its_adapters_along(replica: Replica, texts: dict[str, list[int]]) -> None:
    await replica.reconfigure("one")
    previous = replica.state.version
    running = asyncio.create_task(replica.generate("one"))
    await asyncio.sleep(0)
    await replica.reconfigure("two", own="base", revision="swapped")
    assert replica.state.version is not previous
    assert (await running, await replica.generate("two")) == (texts["one"], texts["two"])
    await replica.reconfigure(own="base", revision="none", adapters=None)
    assert replica.state.version.adapters is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"backend": "vllm"}}, "engine.backend is 'vllm': vLLM serves one student per process"),
        ({"engine": {"tensor_parallel_size": 2}}, "engine.tensor_parallel_size is 2"),
        ({"engine": {"swiftkv": False}}, "engine.swiftkv is False"),
        ({"adapters": ["mdl_1"]}, "adapters name 'mdl_1' twice"),
        ({"adapters": ["mdl_2", {"model": "mdl_3", "name": "mdl_2"}]}, "adapters name 'mdl_2' twice"),
    ],
)
def test_a_spec_that_no_replica_can_serve_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeploymentSpec.model_validate({"model": "mdl_1", "adapters": ["mdl_2"], **changes})
