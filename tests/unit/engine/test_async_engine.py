"""Many callers: each gets its own answer, the event loop is never blocked, a lost caller frees the engine."""

import asyncio
import math
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from swiftkv_platform.engine import (
    AsyncLLMEngine,
    EngineConfig,
    LLMEngine,
    Prompt,
    RequestOutput,
    SamplingParams,
)
from swiftkv_platform.engine import outputs as engine_outputs
from swiftkv_platform.engine.frontend import QueueWaitEstimator
from swiftkv_platform.engine.outputs import RequestStream, StreamIntervalController
from swiftkv_platform.errors import EngineDeadError, InvalidInputError, QueueFullError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


class CountingEngine(LLMEngine):
    """An engine that counts its steps."""

    num_steps = 0

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        return super().step()


@pytest_asyncio.fixture
async def engine(swiftkv_dir: Path) -> AsyncIterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine(
        CountingEngine.from_pretrained(
            swiftkv_dir, EngineConfig(max_num_seqs=4, max_num_waiting=2, stream_interval_s=0.0)
        )
    )
    yield engine
    await engine.aclose()


async def answer(engine: AsyncLLMEngine, prompt: Prompt, params: SamplingParams = GREEDY) -> RequestOutput:
    outputs = [output async for output in await engine.submit(prompt, params)]
    return outputs[-1]


def paced(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch, *, steps: int = 1) -> threading.Semaphore:
    """Let the engine take `steps` steps, and one more for each release of the semaphore."""
    may_step, step = threading.Semaphore(steps), engine.engine.step

    def paced_step() -> list[RequestOutput]:
        may_step.acquire()
        return step()

    monkeypatch.setattr(engine.engine, "step", paced_step)
    return may_step


async def check_aborted(engine: AsyncLLMEngine) -> None:
    """Check that the only request, a long one, ends before its last token and leaves nothing behind."""
    assert isinstance(engine.engine, CountingEngine)
    while engine.engine.has_unfinished_requests:
        await asyncio.sleep(0.001)
    assert engine.engine.num_steps < LONG.max_tokens
    assert engine.num_requests == 0
    assert engine.engine.num_free_blocks == engine.engine.num_blocks
    engine.engine.assert_consistent()


async def test_callers_get_answers_of_the_plain_engine_step_by_step(engine: AsyncLLMEngine, swiftkv_dir: Path) -> None:
    prompts: list[Prompt] = [[1, 2], [3], "text"]
    expected = LLMEngine.from_pretrained(swiftkv_dir).generate(prompts, GREEDY)
    answers = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
    assert [output.token_ids for output in answers] == [output.token_ids for output in expected]
    outputs = [output async for output in await engine.submit([1], GREEDY)]
    assert [len(output.token_ids) for output in outputs] == list(range(1, 13))
    assert [output.finished for output in outputs] == [False] * 11 + [True]


async def test_tokens_within_an_interval_come_together(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    may_step = paced(engine, monkeypatch)
    stream = await engine.submit([1], GREEDY, interval_s=3600.0)
    outputs = [await anext(stream)]
    may_step.release(100)
    outputs += [output async for output in stream]
    assert [len(output.token_ids) for output in outputs] == [1, 12]
    assert stream.newest_outputs == {0: outputs[-1]}
    assert [outputs[-1].token_ids] == [(await answer(engine, [1])).token_ids]


async def test_a_passed_interval_hands_over_what_has_come(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_step = paced(engine, monkeypatch)
    stream = await engine.submit([1], GREEDY, interval_s=0.05)
    assert len((await anext(stream)).token_ids) == 1
    may_step.release(3)
    while len(stream.newest_outputs[0].token_ids) < 4:
        await asyncio.sleep(0.001)
    assert len((await anext(stream)).token_ids) == 4, "tokens are handed over while the engine stands still"
    may_step.release(100)
    assert [output async for output in stream][-1].finished


@pytest_asyncio.fixture
async def adaptive(swiftkv_dir: Path) -> AsyncIterator[AsyncLLMEngine]:
    """An engine whose stream interval adapts to its load."""
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(swiftkv_dir, EngineConfig(max_num_seqs=4)))
    yield engine
    await engine.aclose()


async def test_streams_together_collect_tokens(adaptive: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_outputs, "MAX_EVENT_INTERVAL_S", 3600.0)
    monkeypatch.setattr(engine_outputs, "MAX_EVENT_TIME_SHARE", 1e-9)
    may_step = paced(adaptive, monkeypatch)
    arriving = await submit_together(adaptive, [([1], None), ([2], None), ([3], math.inf)])
    *pair, whole = await asyncio.gather(*arriving)
    outputs = [[await anext(stream)] for stream in pair]
    may_step.release(100)
    for stream, own in zip(pair, outputs, strict=True):
        own += [output async for output in stream]
    assert [[len(output.token_ids) for output in own] for own in outputs] == [[1, 12]] * 2
    assert [output async for output in whole][-1].finished
    assert len((await answer(adaptive, [1], replace(GREEDY, max_tokens=1))).token_ids) == 1
    assert adaptive._interval_controller.interval_s == 0.0, "without requests the interval is 0"


async def test_a_stream_that_is_left_holds_up_nobody(adaptive: AsyncLLMEngine) -> None:
    params = replace(LONG, n=3)
    left = await adaptive.submit([1], params)
    assert (await anext(left)).index == 0
    assert adaptive._interval_controller.interval_s > 0.0
    left.close()
    assert adaptive._interval_controller.interval_s == 0.0


def test_the_interval_grows_with_streams_and_with_what_an_event_takes() -> None:
    now = 0.0
    controller = StreamIntervalController(lambda: now)

    def send(num_events: int, each_s: float) -> None:
        nonlocal now
        for _ in range(num_events):
            now += each_s
            controller.count_event()

    controller.add_sequences(1)
    send(engine_outputs.EVENTS_PER_MEASUREMENT + 1, 0.0002)
    assert controller.interval_s == 0.0, "events of a single stream delay no other"
    intervals = []
    for _ in range(4):
        controller.add_sequences(1)
        intervals.append(controller.interval_s)
    assert intervals == pytest.approx(
        [others * 0.0002 / engine_outputs.MAX_EVENT_TIME_SHARE for others in (1, 2, 3, 4)]
    )
    send(engine_outputs.EVENTS_PER_MEASUREMENT, 0.0001)
    assert controller.interval_s == pytest.approx(intervals[-1] / 2)
    controller.add_sequences(1000)
    assert controller.interval_s == engine_outputs.MAX_EVENT_INTERVAL_S
    controller.remove_sequences(1004)
    assert controller.interval_s == 0.0


async def test_a_caller_of_whole_answers_is_woken_once_for_each_sample(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=2, seed=1)
    stream = await engine.submit([1], params, interval_s=math.inf)
    outputs = [output async for output in stream]
    assert sorted(output.index for output in outputs if output.finished) == [0, 1]
    assert len(outputs) <= 3
    assert stream.newest_outputs == {output.index: output for output in outputs if output.finished}


async def submit_together(
    engine: AsyncLLMEngine, requests: list[tuple[Prompt, float | None]]
) -> list[asyncio.Task[RequestStream]]:
    """Submit prompts with their intervals while the engine is held, so that one step sees all of them."""
    may_begin = threading.Event()
    held = asyncio.create_task(engine.run_between_steps(lambda: may_begin.wait(60)))
    arriving = [asyncio.create_task(engine.submit(prompt, GREEDY, interval_s=s)) for prompt, s in requests]
    while engine._worker._work_queue.qsize() < len(arriving):
        await asyncio.sleep(0.001)
    may_begin.set()
    assert await held
    return arriving


@asynccontextmanager
async def queued(directory: Path, now: list[float], **config: Any) -> AsyncIterator[AsyncLLMEngine]:
    """An engine with one place and three requests, whose count of departures takes its time from `now`."""
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(directory, EngineConfig(max_num_seqs=1, **config)))
    engine._wait_estimator = QueueWaitEstimator(lambda: now[0])
    tasks = [asyncio.create_task(answer(engine, [i], LONG)) for i in range(3)]
    await asyncio.sleep(0)
    yield engine
    await asyncio.gather(*tasks)
    assert (await answer(engine, [3])).finished, "the queue is empty again"
    await engine.aclose()


async def refusal(engine: AsyncLLMEngine, num_prompts: int = 1) -> QueueFullError:
    with pytest.raises(QueueFullError) as refused:
        await engine.submit_validated({f"more/{number}": [9] for number in range(num_prompts)}, GREEDY)
    return refused.value


async def test_a_full_queue_knows_how_long_its_places_are_taken(swiftkv_dir: Path) -> None:
    now = [100.0]
    async with queued(swiftkv_dir, now, max_num_waiting=2) as engine:
        assert (await refusal(engine)).retry_after_s == 1.0, "no completion is known yet"
        for _ in range(8):
            engine._wait_estimator.record_completions(1, is_full=True)
            now[0] += 5.0
        assert [(await refusal(engine, n)).retry_after_s for n in (1, 2)] == [pytest.approx(5.0), pytest.approx(10.0)]


async def test_a_queue_that_is_too_slow_says_when_it_is_short_enough(swiftkv_dir: Path) -> None:
    now = [100.0]
    async with queued(swiftkv_dir, now, max_num_waiting=64, max_queue_s=12.0) as engine:
        for _ in range(8):
            engine._wait_estimator.record_completions(1, is_full=True)
            now[0] += 5.0
        assert (await refusal(engine)).retry_after_s == pytest.approx(3.0)
        assert "would wait 15.0 s, max_queue_s is 12" in str(await refusal(engine))
        with pytest.raises(QueueFullError, match="would wait"):
            await engine.submit([2])


async def test_prompt_tokens_bound_the_queue_too(swiftkv_dir: Path) -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=4, max_waiting_prompt_tokens=40)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(swiftkv_dir, config))
    arriving = await submit_together(engine, [([number] * 30, None) for number in (1, 2, 3)])
    *streams, refused = await asyncio.gather(*arriving, return_exceptions=True)
    assert isinstance(refused, QueueFullError)
    assert re.search(r"60 prompt tokens of .* are waiting; the limit is 40", str(refused))
    for stream in streams:
        assert [output async for output in stream][-1].finish_reason == "length"
    assert engine.state.num_waiting_tokens == 0
    assert (await answer(engine, [3])).finished
    await engine.aclose()


async def test_a_caller_that_stops_listening_aborts_its_request(engine: AsyncLLMEngine) -> None:
    stream = await engine.submit([1], LONG)
    for _ in range(5):
        await anext(stream)
    stream.close()
    await check_aborted(engine)
    task = asyncio.create_task(engine.submit([1], LONG))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await check_aborted(engine)
    assert (await answer(engine, [2])).finished


async def test_bad_input_and_an_id_in_use_reach_their_caller_only(engine: AsyncLLMEngine) -> None:
    outputs = await engine.submit([1], LONG, request_id="mine")
    await anext(outputs)
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        await answer(engine, [])
    with pytest.raises(InvalidInputError, match="request_id 'mine' is in use"):
        await engine.submit([2], GREEDY, request_id="mine")
    assert [output async for output in outputs][-1].finish_reason == "length"
    assert engine.num_requests == 0


async def test_a_request_gets_nothing_of_an_aborted_namesake(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await answer(engine, [2])
    may_step, begun, step = threading.Semaphore(1), threading.Semaphore(0), engine.engine.step

    def paced_step() -> list[RequestOutput]:
        begun.release()
        may_step.acquire()
        return step()

    monkeypatch.setattr(engine.engine, "step", paced_step)
    left = await engine.submit([1], LONG, "taken")
    await anext(left)
    for _ in range(2):  # the second step is being held
        await asyncio.to_thread(begun.acquire)
    left.close()
    follower = asyncio.create_task(engine.submit([2], GREEDY, "taken"))
    await asyncio.sleep(0)
    may_step.release(100)
    outputs = [output async for output in await follower]
    assert {tuple(output.prompt_token_ids) for output in outputs} == {(2,)}
    assert outputs[-1].token_ids == expected.token_ids


@pytest.mark.parametrize("where", ["step", "put"])
async def test_callers_and_health_checks_hear_of_failures(
    engine: AsyncLLMEngine, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either a step fails or handing out its outputs does."""

    def fail(*_: Any) -> list[RequestOutput]:
        raise RuntimeError("out of memory")

    put = RequestStream.put_output
    if where == "step":
        monkeypatch.setattr(engine.engine, "step", fail)
    else:
        monkeypatch.setattr(RequestStream, "put_output", lambda self, output: fail() if output else put(self, None))
    engine.check_health()
    results = await asyncio.gather(*(answer(engine, [i]) for i in range(2)), return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) and "out of memory" in str(result) for result in results)
    with pytest.raises(EngineDeadError):
        engine.check_health()
    with pytest.raises(EngineDeadError):
        await answer(engine, [1])


async def test_closing_tells_callers(engine: AsyncLLMEngine) -> None:
    task = asyncio.create_task(answer(engine, [1], LONG))
    await asyncio.sleep(0.01)
    await engine.aclose()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task


def test_wait_estimator_from_idle_places_and_too_few_of_them_say_nothing() -> None:
    """Only departures from a full engine count, from a minimum on; while it stalls, expected waits grow."""
    now = 100.0
    departures = QueueWaitEstimator(lambda: now)
    departures.record_completions(3, is_full=True)
    now += 9.0
    assert departures.estimate_wait_s(5) == 0.0
    departures.record_completions(1, is_full=True)
    assert departures.estimate_wait_s(5) > 0.0
    departures.record_completions(1, is_full=False)
    assert departures.estimate_wait_s(5) == 0.0
    departures.record_completions(8, is_full=True)
    waits = []
    for _ in range(3):
        now += 8.0
        waits.append(departures.estimate_wait_s(1))
    assert waits == pytest.approx([1.0, 2.0, 3.0])
