"""Shadow: compare the served model with another one on a share of its answers. Knows no HTTP.

Both models read the prompt and the finished answer again in one forward pass each, and their distributions at each
token of the answer are compared. The served model does so in its engine's thread between two steps, which delays
running requests. So only one answer is compared at a time, and long ones are skipped.
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
"""Most tokens of prompt and answer together that are compared."""
MAX_POSITIONS = 64
"""Most tokens of an answer, from its beginning, that are compared, since their distributions are held in memory."""


@dataclass(frozen=True)
class ShadowComparison:
    """Comparison of two models over the tokens of one answer."""

    num_positions: int
    kl: float
    """Sum over the positions of KL(judge || served), nats, at temperature 1."""
    num_agreeing: int
    """Positions at which both models have the same most probable token."""


Judge = Callable[[list[int], int], "Awaitable[torch.Tensor]"]
"""(token ids, n) -> log-probabilities [n, vocab_size] of the last n tokens, each given the tokens before it. An engine
computes them between two of its steps, and raises `EngineDeadError` when it is closed."""


def judging(model: Any) -> Judge:
    """Return the judge of a model without an engine, such as a student's own teacher; it runs in a thread."""
    from swiftkv_platform.engine.sampler import log_probs

    return lambda token_ids, num_positions: asyncio.to_thread(log_probs, model, token_ids, num_positions)


def compare(judge: torch.Tensor, served: torch.Tensor) -> ShadowComparison:
    """Compare log-probabilities [num_positions, vocab_size] of judge and served model."""
    kl = (judge.exp() * (judge - served)).sum(-1).clamp_min(0.0)
    agreeing = judge.argmax(-1) == served.argmax(-1)
    return ShadowComparison(len(judge), float(kl.double().sum()), int(agreeing.sum()))


class Shadow:
    """Compares a share of an engine's answers with a judge's distributions. `share`: of the answers, 0 to 1; may be
    changed later. `compared`: called with each comparison, or None if a chosen answer was not compared."""

    def __init__(
        self, engine: AsyncLLMEngine, judge: Judge, share: float, compared: Callable[[ShadowComparison | None], None]
    ) -> None:
        self.share = share
        self._served = engine.score
        self._judge = judge
        self._compared = compared
        self._running: asyncio.Task[None] | None = None

    def consider(self, answers: Answers) -> None:
        """Start to compare an answer that has ended, if it is chosen. Returns at once."""
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
        """Wait for the running comparison."""
        if self._running is not None:
            await self._running

    async def _compare(self, token_ids: list[int], num_positions: int) -> None:
        try:
            judge, served = await asyncio.gather(
                self._judge(token_ids, num_positions), self._served(token_ids, num_positions)
            )
            self._compared(compare(judge, served))
        except Exception:  # a failed comparison must not affect requests
            get_logger().exception("shadow_failed")
            self._compared(None)
