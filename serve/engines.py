"""The engine behind a replica, as routes, swaps and metrics see it. Two implement it: the native one, and vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from swiftkv_platform.engine import EngineConfig, SamplingParams
from swiftkv_platform.specs.engine import Backend

if TYPE_CHECKING:
    from swiftkv_platform.engine import Prompt, RequestStream
    from swiftkv_platform.engine.loading import ModelDescription
    from swiftkv_platform.engine.outputs import EngineState
    from swiftkv_platform.engine.reading import Readers
    from swiftkv_platform.engine.requests import RequestReader


class Engine(Protocol):
    """One loaded model that answers coroutines of one event loop."""

    backend: Backend
    config: EngineConfig
    model: ModelDescription
    reader: RequestReader
    readers: Readers

    @property
    def max_sequences(self) -> int:
        """Sequences that run and wait at most."""
        ...

    @property
    def num_requests(self) -> int:
        """Callers being served or waiting."""
        ...

    @property
    def state(self) -> EngineState:
        """Requests and memory at the moment. Takes no time."""
        ...

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Refuse what need not be read to be refused, all prompts together. Raises as `submit`."""
        ...

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        interval_s: float | None = None,
    ) -> RequestStream:
        """Admit a request, whose stream is read to its end or closed.

        Raises:
            InvalidInputError: what this model or this engine cannot answer.
            QueueFullError: too many run and wait.
            EngineDeadError: the engine has failed.
        """
        ...

    def check_health(self) -> None:
        """Raises `EngineDeadError` once the engine has failed or was closed."""
        ...

    async def aclose(self) -> None:
        """End it; callers still being served get `EngineDeadError`."""
        ...
