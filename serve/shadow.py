"""Another model beside the one that serves: what it would have said in a share of the answers. Knows no HTTP.

Both models read a finished answer again, its prompt before it, in one forward pass each, and their distributions over
every token of it are compared. The model in service does so in its engine's own thread, between two steps: a request
that runs then waits for that long. So one answer is compared at a time, and long ones are left out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiftkv_platform.logs import get_logger

if TYPE_CHECKING:
    import torch

    from swiftkv_platform.engine import AsyncLLMEngine
    from swiftkv_platform.serve.answers import Answers

MAX_TOKENS = 2048
"""Longest prompt and answer that are compared."""
MAX_POSITIONS = 64
"""Tokens of an answer that are compared, from its beginning: their distributions are held in memory."""


@dataclass(frozen=True)
class ShadowComparison:
    """Two models over the tokens of one answer."""

    num_positions: int
    kl: float
    """Sum over the positions of KL(judge || served), nats, at temperature 1."""
    num_agreeing: int
    """Positions where the most probable token is the same."""


Judge = Callable[[list[int], int], "Awaitable[torch.Tensor]"]
"""(token ids, n) -> log-probabilities [n, vocab_size] of the last n, given those before each. An engine's are asked for
between two of its steps, and raise `EngineDeadError` when it is closed."""


def judging(model: Any) -> Judge:
    """A model without an engine, such as a student's own teacher; it runs in a thread of its own."""
    from swiftkv_platform.engine.sampler import log_probs

    return lambda token_ids, num_positions: asyncio.to_thread(log_probs, model, token_ids, num_positions)


def compare(judge: torch.Tensor, served: torch.Tensor) -> ShadowComparison:
    """Compare log-probabilities [num_positions, vocab_size] of judge and served model."""
    kl = (judge.exp() * (judge - served)).sum(-1).clamp_min(0.0)
    agreeing = judge.argmax(-1) == served.argmax(-1)
    return ShadowComparison(len(judge), float(kl.double().sum()), int(agreeing.sum()))


class Shadow:
    """Compares a share of the answers that an engine gives. `share`: of the answers, 0 to 1; it may be changed.
    `compared`: hears of every comparison, and of None for an answer that was chosen and left out."""

    def __init__(
        self, engine: AsyncLLMEngine, judge: Judge, share: float, compared: Callable[[ShadowComparison | None], None]
    ) -> None:
        self.share = share
        self._served = engine.score
        self._judge = judge
        self._compared = compared
        self._running: asyncio.Task[None] | None = None

    def consider(self, answers: Answers) -> None:
        """An answer is finished. Returns at once."""
        if answers.outcome != "finished" or not answers.outputs[0].token_ids or random.random() >= self.share:  # noqa: S311 (no secret)
            return
        [output, *_] = answers.outputs
        answer = output.token_ids[:MAX_POSITIONS]
        token_ids = [*output.prompt_token_ids, *answer]
        if len(token_ids) > MAX_TOKENS or (self._running is not None and not self._running.done()):
            self._compared(None)
            return
        self._running = asyncio.create_task(self._compare(token_ids, len(answer)), name="shadow")

    async def close(self) -> None:
        """Returns when the comparison that runs is done."""
        if self._running is not None:
            await self._running

    async def _compare(self, token_ids: list[int], num_positions: int) -> None:
        try:
            judge, served = await asyncio.gather(
                self._judge(token_ids, num_positions), self._served(token_ids, num_positions)
            )
            self._compared(compare(judge, served))
        except Exception:  # whatever it is, callers are answered
            get_logger().exception("shadow_failed")
            self._compared(None)
