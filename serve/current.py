"""What a replica serves at the moment: a model behind an engine. A swap replaces the whole. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from serve.answers import Answers, Asking
from serve.metrics import Metrics
from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.errors import EngineDeadError

if TYPE_CHECKING:
    from swiftkv_platform.engine import AsyncLLMEngine

_DRAIN_POLL_S = 0.05


class ModelCard(BaseModel):
    """What is served."""

    model_config = ConfigDict(frozen=True)

    deployment: str
    """`dep_` id."""
    model: str
    manifest_digest: str | None
    """SHA-256 of the artifact's manifest; null for a model served unverified."""
    swiftkv: dict[str, int] | None
    """num_hidden_layers, num_key_value_layers and key_value_group_size; null for a dense model."""
    max_model_len: int
    """Tokens of prompt and answer together."""


class SwapState(BaseModel):
    """Where a replica is on its way to what it was last told to serve."""

    model_config = ConfigDict(frozen=True)

    status: Literal["done", "loading", "refused"] = "done"
    """`loading` and `refused`: the version before is served."""
    revision: str = ""
    """Of what was last asked for."""
    message: str = ""
    """Why it was refused."""


@dataclass(eq=False)
class Version:
    """One model in service. A request keeps the version it began with."""

    engine: AsyncLLMEngine
    card: ModelCard
    created: int
    """Unix seconds."""
    num_entering: int = field(default=0, init=False)
    """Requests that have chosen this version and are not in the engine yet."""

    @property
    def tokenizer(self) -> Any:
        return self.engine.engine.tokenizer

    async def drain(self) -> None:
        """Returns when nobody uses it any more; then the engine is closed."""
        while self.num_entering or self.engine.num_requests:
            await asyncio.sleep(_DRAIN_POLL_S)
        await self.engine.aclose()


class Current:
    """The version that new requests go to."""

    def __init__(self, version: Version | None = None, metrics: Metrics | None = None, *, replica: str = "") -> None:
        self._version = version
        self.swap = SwapState()
        self.replica = replica
        """Serve's name of this replica."""
        self.metrics = metrics or Metrics()
        self.metrics.follow(lambda: None if self._version is None else self._version.engine.engine, replica)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been loaded yet."""
        return self._version is None

    @property
    def version(self) -> Version:
        """Raises `EngineDeadError` while nothing is loaded."""
        if self._version is None:
            raise EngineDeadError("no model is loaded yet")
        return self._version

    def replace(self, version: Version) -> Version | None:
        """New requests go to `version` from now on. Returns the one before, to be drained."""
        before, self._version = self._version, version
        return before

    @contextmanager
    def entering(self) -> Iterator[Version]:
        """The version for a new request, kept open until the request is in its engine."""
        version = self.version
        version.num_entering += 1
        try:
            yield version
        finally:
            version.num_entering -= 1

    async def ask(
        self, version: Version, prompts: Sequence[str | list[int]], params: SamplingParams, asking: Asking
    ) -> Answers:
        """Admit a request to a version. Raises as `AsyncLLMEngine.submit`."""
        with self.metrics.counting_refusals():
            return await Answers.begin(version.engine, prompts, params, asking, self.metrics.finished)
