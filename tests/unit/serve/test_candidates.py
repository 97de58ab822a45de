"""Two models in a replica: shares of the requests, and what one would have said to the other's answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert
from swiftkv_platform.serve.args import ReplicaArgs, Served
from swiftkv_platform.serve.current import Current, Version
from swiftkv_platform.serve.deployment import load_version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.swaps import Swaps
from tests.fakes.tokenizers import byte_tokenizer
from tests.unit.engine.tiny_models import make_model, save_dense, save_swiftkv

ARGS = ReplicaArgs(id="dep_1")
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two students of one teacher."""
    directory = tmp_path_factory.mktemp("models")
    save_swiftkv(directory / "one")
    convert(make_model(), num_key_value_layers=3, key_value_group_size=1).save_pretrained(directory / "two")
    byte_tokenizer().save_pretrained(directory / "two")
    return {name: str(directory / name) for name in ("one", "two")}


def served(paths: dict[str, str], **options: Any) -> dict[str, Any]:
    return {"model": "one", "artifact_uri": paths["one"], "verify": False, **options}


def with_candidate(paths: dict[str, str], share: float) -> dict[str, Any]:
    return served(paths, candidate={"model": "two", "artifact_uri": paths["two"], "share": share})


@pytest_asyncio.fixture
async def current() -> AsyncIterator[Current]:
    current = Current()
    yield current
    await current.version.drain()


async def want(current: Current, document: dict[str, Any]) -> Version:
    await Swaps(current, lambda served: load_version(ARGS, served, current.metrics.compared)).want(document)
    return current.version


def client_of(current: Current) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_http_app(current)), base_url="http://serve")


def counted(current: Current, name: str) -> float:
    lines = current.metrics.text().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"swiftkv:{name} "))


async def test_a_candidate_answers_its_share_under_its_own_name(current: Current, paths: dict[str, str]) -> None:
    version = await want(current, with_candidate(paths, 0.0))

    async with client_of(current) as client:

        async def models() -> list[str]:
            bodies = [{"model": name, "prompt": [1, 2], **GREEDY} for name in ("one", "two") * 10]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.raise_for_status().json()["model"] for answer in answers]

        assert set(await models()) == {"one"}
        version.candidate_share = 1.0
        assert set(await models()) == {"two"}
        version.candidate_share = 0.5
        assert {model for _ in range(3) for model in await models()} == {"one", "two"}
        health = (await client.get("/health")).json()
        assert (health["model"], health["candidate"]["model"], health["candidate"]["share"]) == ("one", "two", 0.5)
        assert (await client.post("/v1/completions", json={"model": "three", "prompt": "a"})).status_code == 404
    assert counted(current, 'requests_total{model="one"}') + counted(current, 'requests_total{model="two"}') == 100


async def test_another_share_loads_nothing(current: Current, paths: dict[str, str]) -> None:
    swaps = Swaps(current, lambda served: load_version(ARGS, served))
    await swaps.want(with_candidate(paths, 0.1))
    version = current.version
    await swaps.want({**with_candidate(paths, 0.9), "ignored_fields": ["suffix"], "revision": "more"})
    while current.swap.revision != "more" or current.swap.status == "loading":
        await asyncio.sleep(0.001)
    assert current.version is version
    assert version.candidate_share == 0.9
    assert version.candidate is not None
    assert version.ignored_fields == version.candidate.ignored_fields == {"suffix"}


async def exact(judge: str, paths: dict[str, str], prompt: list[int], answer: list[int]) -> tuple[float, int]:
    """(KL summed over the answer, positions with the same most probable token), by plain forward passes."""
    student = AutoModelForCausalLM.from_pretrained(paths["one"]).eval()
    other = (
        AutoModelForCausalLM.from_pretrained(paths["one"]).eval().swiftkv(False)
        if judge == "teacher"
        else AutoModelForCausalLM.from_pretrained(paths["two"]).eval()
    )
    with torch.inference_mode():
        p, q = (
            model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            for model in (other, student)
        )
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    return float(kl), int((p.argmax(-1) == q.argmax(-1)).sum())


@pytest.mark.parametrize("judge", ["teacher", "candidate"])
async def test_a_shadow_tells_how_far_the_other_model_is(current: Current, paths: dict[str, str], judge: str) -> None:
    document = with_candidate(paths, 0.0) if judge == "candidate" else served(paths)
    version = await want(current, {**document, "shadow": {"against": judge, "share": 1.0}})
    assert version.shadow is not None
    async with client_of(current) as client:
        answer = (await client.post("/generate", json={"prompt": [5, 6, 7], **GREEDY})).json()["choices"][0]
        await version.shadow.close()
        kl, agreeing = await exact(judge, paths, [5, 6, 7], answer["token_ids"])
        assert kl > 0.01, "the models differ"
        assert counted(current, "shadow_kl_nats_total") == pytest.approx(kl, rel=1e-3)
        assert counted(current, "shadow_positions_total") == 12
        assert counted(current, "shadow_top1_agreeing_positions_total") == agreeing
        scored = {"prompt": [5, 6, 7], "max_tokens": 0, "prompt_logprobs": 1}
        assert (await client.post("/generate", json=scored)).json()["usage"]["completion_tokens"] == 0
        await version.shadow.close()
        assert counted(current, "shadow_positions_total") == 12, "an answer without tokens is nothing to judge"
        version.shadow.share = 0.0
        await client.post("/generate", json={"prompt": [5, 6, 7], **GREEDY})
        await version.shadow.close()
        assert counted(current, "shadow_positions_total") == 12


async def test_one_answer_is_judged_at_a_time_and_a_failing_judge_fails_nobody(
    current: Current, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await want(current, served(paths, shadow={"against": "teacher", "share": 1.0}))
    assert version.shadow is not None
    may_judge = asyncio.Event()

    async def fail(*_: object) -> torch.Tensor:
        await may_judge.wait()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(version.shadow, "_judge", type("Failing", (), {"score": fail})())
    async with client_of(current) as client:
        for _ in range(3):
            assert (await client.post("/generate", json={"prompt": [5], **GREEDY})).status_code == 200
    assert counted(current, "shadow_skipped_total") == 2
    may_judge.set()
    await version.shadow.close()
    assert counted(current, "shadow_skipped_total") == 3
    assert counted(current, "shadow_positions_total") == 0


async def test_what_cannot_be_is_refused(tmp_path: Path, paths: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="give a candidate, or 'teacher'"):
        Served.model_validate(served(paths, shadow={"against": "candidate"}))
    with pytest.raises(ValidationError, match=r"candidate\.share"):
        Served.model_validate(with_candidate(paths, 1.1))
    document = {"model": "dense", "artifact_uri": str(save_dense(tmp_path)), "verify": False}
    with pytest.raises(ModelError, match="no SwiftKV student"):
        await load_version(ARGS, Served.model_validate({**document, "shadow": {"against": "teacher"}}))
