"""Swaps of versions: between requests, the last wanted one, and never to one that cannot be served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from swiftkv_platform.engine import AsyncLLMEngine, LLMEngine, SamplingParams
from swiftkv_platform.errors import EngineDeadError, ModelError
from swiftkv_platform.serve.answers import RequestContext
from swiftkv_platform.serve.args import Served
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.swaps import Swaps
from tests.unit.engine.tiny_models import save_swiftkv

LONG = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_swiftkv(tmp_path_factory.mktemp("swiftkv"))


class Versions:
    """Loads when a test says so. The model `bad` cannot be loaded."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.loaded: dict[str, Version] = {}
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, served: Served) -> Version:
        await self.may_load.wait()
        if served.model == "bad":
            raise ModelError("it is bad")
        engine = AsyncLLMEngine(LLMEngine.from_pretrained(self.model_dir, served.engine))
        card = ModelCard(deployment="dep_1", model=served.model, manifest_digest=None, swiftkv=None, max_model_len=64)
        self.loaded[served.model] = Version(engine, card, created=1)
        return self.loaded[served.model]


def document(model: str, **changes: Any) -> dict[str, Any]:
    return {"model": model, "artifact_uri": "unused", "revision": f"rev-{model}", **changes}


@pytest_asyncio.fixture
async def versions(model_dir: Path) -> Versions:
    return Versions(model_dir)


async def swapped(current: Current, revision: str) -> None:
    while current.swap.status == "loading" or current.swap.revision != revision:
        await asyncio.sleep(0.001)


def count(current: Current, outcome: str) -> int:
    lines = current.metrics.text().decode().splitlines()
    prefix = f'swiftkv:swaps_total{{outcome="{outcome}"}} '
    return int(next((float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)), 0))


async def test_running_requests_finish_on_the_old_version_which_is_then_closed(versions: Versions) -> None:
    current = Current()
    swaps = Swaps(current, versions.load)
    await swaps.want(document("one"))
    with current.entering() as version:
        answers = await current.ask(version, [[1, 2]], LONG, RequestContext(interval_s=0.0))
    outputs = answers.as_they_come()
    await anext(outputs)
    with current.entering() as undecided:
        await swaps.want(document("two"))
        assert current.version.card.model == "one", "it serves while the new one loads"
        await swapped(current, "rev-two")
        assert current.version.card.model == "two"
        *_, (_, last) = [item async for item in outputs]
        assert (len(last.token_ids), last.finish_reason) == (50, "length")
        late = await current.ask(undecided, [[3]], LONG, RequestContext())
    assert len((await late.all())[0].token_ids) == 50, "it had chosen before the swap"
    old = versions.loaded["one"].engine
    while not _is_closed(old):
        await asyncio.sleep(0.01)
    assert not _is_closed(versions.loaded["two"].engine)
    assert count(current, "succeeded") == 1


def _is_closed(engine: AsyncLLMEngine) -> bool:
    try:
        engine.check_health()
    except EngineDeadError:
        return True
    return False


@pytest.mark.parametrize("bad", [document("bad"), document("bad", colour="red"), document("bad", engine={"dtype": 8})])
async def test_a_bad_version_is_refused_and_the_old_one_stays(versions: Versions, bad: dict[str, Any]) -> None:
    current = Current()
    swaps = Swaps(current, versions.load)
    await swaps.want(document("one"))
    await swaps.want(bad)
    await swapped(current, "rev-bad")
    assert (current.swap.status, current.version.card.model) == ("refused", "one")
    assert current.swap.message
    assert count(current, "refused") == 1
    await swaps.want(document("one"))
    await swapped(current, "rev-one")
    assert current.swap.status == "done"
    assert current.version is versions.loaded["one"], "what is served already is not loaded again"


async def test_fields_to_ignore_count_at_once_and_load_nothing(versions: Versions) -> None:
    current = Current()
    swaps = Swaps(current, versions.load)
    await swaps.want(document("one"))
    before = current.version
    for fields in (["suffix", "*"], None):
        await swaps.want(document("one", ignored_fields=fields, revision=str(fields)))
        await swapped(current, str(fields))
        assert current.version is before
        assert current.version.ignored_fields == frozenset(fields or ())
    await swaps.want(document("one", ignored_fields=["no field"], revision="bad"))
    await swapped(current, "bad")
    assert current.swap.status == "refused"


async def test_the_last_wanted_version_wins(versions: Versions) -> None:
    current = Current()
    swaps = Swaps(current, versions.load)
    await swaps.want(document("one"))
    versions.may_load.clear()
    for model in ("two", "three", "bad", "four"):
        await swaps.want(document(model))
        await asyncio.sleep(0)
    versions.may_load.set()
    await swapped(current, "rev-four")
    assert current.version.card.model == "four"
    assert set(versions.loaded) == {"one", "two", "four"}, "what nobody wants any more is not loaded"
    assert count(current, "superseded") == 1
    assert _is_closed(versions.loaded["two"].engine)


async def test_a_first_version_that_cannot_be_served_is_an_error(versions: Versions) -> None:
    current = Current()
    with pytest.raises(ModelError, match="it is bad"):
        await Swaps(current, versions.load).want(document("bad"))
    assert current.is_empty
