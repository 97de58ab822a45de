"""The model version that a replica serves, with its engine; a swap replaces it. Knows no HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from swiftkv_platform.contract.traffic import is_valid_user
from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.errors import InvalidInputError, LoadingError, QueueFullError, RateLimitedError, SwiftKVError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.limits import REPLICA_BODY_BYTES, REPLICA_BODY_VALUES, REPLICA_TOKEN_IDS
from swiftkv_platform.serve.access import Caller, TokenReservation
from swiftkv_platform.serve.args import ServedConfig
from swiftkv_platform.serve.collector import CapturePlan, Conversation, OutputCollector, RequestContext
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.traffic import TrafficRecorder
from swiftkv_platform.specs.deployment import ResolvedCapture
from swiftkv_platform.web.limiters import Sender

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.engine.frontend import EngineFrontend
    from swiftkv_platform.serve.adapters import AdapterPool

T = TypeVar("T")

_DRAIN_POLL_S = 0.05
_RENDERED_BYTES_PER_TOKEN = 64
"""Estimated bytes per log-probability in a response, for scheduling its rendering."""
BASE_BODY_BYTES = 1 << 20
"""Max bytes of a request body without prompts: stop strings, schemas, names, spaces."""
NUM_LONGEST_PROMPTS = 8
"""Number of prompts of max length that one body may have."""
ESCAPED_BYTES = 6


class ServedModelInfo(FrozenBaseModel):
    """Description of the served model."""

    deployment: str
    """`dep_` id."""
    model: str
    manifest_digest: str | None
    """SHA-256 of the artifact's manifest; null for a model served unverified."""
    swiftkv: dict[str, int] | None
    """num_hidden_layers, num_key_value_layers and key_value_group_size; null for a dense model."""
    max_model_len: int
    """Max tokens of prompt and completion together."""
    load_seconds: dict[str, float] = {}
    """Seconds per phase of loading: `fetch`, `load` and `check`."""


class SwapState(FrozenBaseModel):
    """State of a replica's swap to the last requested version."""

    status: Literal["done", "loading", "refused"] = "done"
    """In `loading` and `refused`, the previous version is served."""
    revision: str = ""
    """Last requested revision."""
    message: str = ""
    """Reason of a refusal."""


@dataclass(eq=False)
class ModelVersion:
    """A loaded model with its engine. A request runs on the same version from beginning to end."""

    engine: EngineFrontend
    model_info: ServedModelInfo
    created: int
    """Unix seconds."""
    candidate: ModelVersion | None = None
    """Gets `candidate_share` of the requests."""
    candidate_share: float = 0.0
    tool_call_parser: str | None = None
    """Name in `serve.tools.families.FAMILIES`; None: detected from the chat template."""
    names: frozenset[str] = frozenset()
    """Other accepted values of a request's `model`."""
    ignored_fields: frozenset[str] = frozenset()
    """Request fields below `/v1` that the deployment ignores."""
    cors_origins: frozenset[str] = frozenset()
    capture: ResolvedCapture | None = None
    adapters: AdapterPool | None = None
    """Adapters that share the model's base; None: the deployment has none."""
    num_open_holds: int = field(default=0, init=False)
    """Number of requests that need the open engine before or after their generation."""

    @cached_property
    def body_limits(self) -> tuple[int, int]:
        """(max bytes, max JSON values) of a request body, by the context length."""
        max_text_bytes = self.engine.input_processor.max_prompt_bytes * ESCAPED_BYTES * NUM_LONGEST_PROMPTS
        max_model_len = self.engine.model.context_length
        max_token_ids = min(max_model_len * self.engine.max_sequences_per_caller, REPLICA_TOKEN_IDS.default)
        max_values = REPLICA_BODY_VALUES.default + max(max_model_len, max_token_ids)
        return min(BASE_BODY_BYTES + max_text_bytes, REPLICA_BODY_BYTES.default), max_values

    @contextmanager
    def hold_open(self) -> Iterator[None]:
        """Keep the engine open within the context, even while it has no request."""
        self.num_open_holds += 1
        try:
            yield
        finally:
            self.num_open_holds -= 1

    def accepts_model_name(self, name: str) -> bool:
        return name == self.model_info.model or name in self.names

    async def find_adapter(self, name: str | None) -> ModelVersion | None:
        """Return the adapter that a request's `model` names, loaded; None if it names none. Raises as
        `AdapterPool.acquire`."""
        adapter = None if name is None or self.adapters is None else self.adapters.find_model(name)
        return None if adapter is None or self.adapters is None else await self.adapters.acquire(adapter)

    @property
    def served_models(self) -> list[str]:
        """Ids of the model and its adapters."""
        return [self.model_info.model, *(self.adapters.models if self.adapters else ())]

    @property
    def is_idle(self) -> bool:
        """Whether no request uses this version."""
        return not (self.num_open_holds or self.engine.num_requests)

    def choose_version(self) -> ModelVersion:
        """Return this version, or the candidate with the probability `candidate_share`."""
        is_candidate = random.random() < self.candidate_share  # noqa: S311  # not a secret
        return self.candidate if self.candidate is not None and is_candidate else self

    def plan_capture(
        self, path: str, *, allows_capture: bool, user: str | None, conversation: Conversation | None = None
    ) -> CapturePlan | None:
        """Return how to capture a new request, with the probability of the deployment's `capture.share`; else None.

        Args:
            path: route of the request.
            allows_capture: False if the caller has refused that the request is stored.
            user: end user, as the caller named him.
            conversation: None if the prompts are texts or token ids.
        """
        is_chosen = self.capture is not None and random.random() < self.capture.share  # noqa: S311  # not a secret
        # Without a tokenizer there is no text. Rows of other names could not be deleted by them.
        is_deletable = user is None or is_valid_user(user)
        if self.capture is None or not (is_chosen and allows_capture and is_deletable) or self.tokenizer is None:
            return None
        return CapturePlan(self.capture, path, self.engine.input_processor.decode, user, conversation)

    def apply_settings(self, served: ServedConfig) -> None:
        """Apply the settings of the same models that need no loading."""
        self.apply_request_settings(served)
        if served.candidate is not None:
            self.candidate_share = served.candidate.share

    def apply_request_settings(self, served: ServedConfig) -> None:
        """Apply the settings of single requests, of any models: captured traffic, ignored fields and CORS origins."""
        self.ignored_fields = frozenset(served.ignored_fields or ())
        self.capture = served.capture
        self.cors_origins = frozenset(served.cors_origins or ())
        if self.candidate is not None:
            self.candidate.apply_request_settings(served)
        if self.adapters is not None:
            self.adapters.apply_request_settings(served)

    def check_health(self) -> None:
        """Raise `EngineDeadError` if an engine has failed."""
        self.engine.check_health()
        if self.candidate is not None:
            self.candidate.check_health()

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    async def render_response(
        self, render: Callable[[], T], outputs: Sequence[RequestOutput], sender: Sender, *, echo: bool = False
    ) -> T:
        """Return `render()`. It runs in the engine's reader threads if the response has log-probabilities or an echoed
        prompt, since each of their tokens is decoded."""
        if not echo and all(output.logprobs is None and output.prompt_logprobs is None for output in outputs):
            return render()
        num_tokens = sum(len(output.prompt_token_ids) + len(output.token_ids) for output in outputs)
        return await self.engine.tokenizer_threads.run(render, num_tokens * _RENDERED_BYTES_PER_TOKEN, sender)

    async def drain(self) -> None:
        """Wait until no request uses this version, then close its engine and candidate."""
        while not self.is_idle:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self.adapters is not None:
            await self.adapters.drain()
        if self.candidate is not None:
            await self.candidate.drain()
        await self.engine.aclose()


class RequestObserver(Protocol):
    """Listener for the end of requests."""

    def on_request_ended(self, collector: OutputCollector, model_info: ServedModelInfo) -> None:
        """Handle the end of an admitted request, see `OutputCollector.outcome`."""
        ...

    def on_request_refused(self, error: SwiftKVError, caller: Caller, model_info: ServedModelInfo) -> None: ...


class ReplicaState:
    """State of a replica: the version for new requests, the state of a swap, and metrics."""

    def __init__(
        self,
        version: ModelVersion | None = None,
        metrics: Metrics | None = None,
        *,
        replica: str = "",
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self.swap = SwapState()
        self.replica = replica
        self.metrics = metrics or Metrics()
        self.recorder = TrafficRecorder(self.metrics.count_captured)
        self._observers = (*observers, self.recorder)
        self.metrics.replica = replica
        self.metrics.version = self._version = version

    @property
    def has_no_model(self) -> bool:
        return self._version is None

    @property
    def version(self) -> ModelVersion:
        """Version for new requests. Raises `LoadingError` while no model is loaded."""
        if self._version is None:
            raise LoadingError("no model is loaded yet: the first one is loading")
        return self._version

    def replace_version(self, version: ModelVersion) -> ModelVersion | None:
        """Send new requests to `version`. Returns the previous version, which the caller must drain."""
        previous, self._version = self._version, version
        self.metrics.version = version
        return previous

    def get_cors_origins(self) -> frozenset[str]:
        return frozenset() if self._version is None else self._version.cors_origins

    @property
    def body_limits(self) -> tuple[int, int]:
        """(max bytes, max JSON values) of a request body, for the served models."""
        served = () if self._version is None else (self._version, self._version.candidate)
        limits = [version.body_limits for version in served if version is not None]
        if not limits:
            return REPLICA_BODY_BYTES.default, REPLICA_BODY_VALUES.default + REPLICA_TOKEN_IDS.default
        max_bytes, max_values = zip(*limits, strict=True)
        return max(max_bytes), max(max_values)

    @asynccontextmanager
    async def acquire_version(self, model: str | None = None) -> AsyncIterator[ModelVersion]:
        """Yield the version for a new request, and keep its engine open within the context. `model`: the request's, if
        it names one; an adapter is loaded if it is not resident. Raises as `AdapterPool.acquire`."""
        version = self.version
        with version.hold_open():  # also while an adapter is loaded into its engine
            version = await version.find_adapter(model) or version.choose_version()
            with version.hold_open():
                yield version

    async def find_version(self, model: str | None) -> ModelVersion:
        """Return the adapter that `model` names, loaded, or the version for new requests. Raises as
        `AdapterPool.acquire`."""
        version = self.version
        return await version.find_adapter(model) or version

    async def submit(
        self, version: ModelVersion, prompts: Sequence[str | list[int]], params: SamplingParams, context: RequestContext
    ) -> OutputCollector:
        """Validate a request and submit it to a version. Raises as `EngineFrontend.submit`, `RateLimitedError` and
        `ForbiddenError`."""
        context.caller.check_priority(context.priority)
        self.metrics.count_request(version.model_info.model)
        reservation, refusal_cost = TokenReservation(), 0

        def close(collector: OutputCollector) -> None:
            if collector.outputs:  # without outputs, the number of prompt tokens is unknown
                reservation.settle(collector.num_tokens)
            for observer in self._observers:
                observer.on_request_ended(collector, version.model_info)

        try:
            # 1. reserve the max tokens of the caller's quota
            if context.caller.quota is not None:
                reservation = context.caller.quota.reserve_tokens(_count_max_tokens(prompts, params))
            # 2. validate without tokenizing; from here on, an invalid request has cost the tokenizing of its texts
            version.engine.validate(prompts, params)
            refusal_cost = _estimate_text_tokens(prompts)
            # 3. admit, tokenize and start
            record = partial(self.metrics.record_output, model=version.model_info.model)
            return await OutputCollector.submit(version.engine, prompts, params, context, record, close)
        except (QueueFullError, InvalidInputError, RateLimitedError) as error:
            # A full queue costs nothing, since the caller retries.
            reservation.settle(refusal_cost if isinstance(error, InvalidInputError) else 0)
            self.metrics.count_refusal(error, version.model_info.model)
            for observer in self._observers:
                observer.on_request_refused(error, context.caller, version.model_info)
            raise


def _count_max_tokens(prompts: Sequence[str | list[int]], params: SamplingParams) -> int:
    """Return the max tokens of a request, without text prompts, whose tokens are not counted yet."""
    max_output_tokens = len(prompts) * params.n * params.max_tokens
    return max_output_tokens + sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))


def _estimate_text_tokens(prompts: Sequence[str | list[int]]) -> int:
    """Estimate the tokens of the text prompts, at four bytes per token."""
    return sum(len(prompt.encode(errors="surrogatepass")) for prompt in prompts if isinstance(prompt, str)) // 4
