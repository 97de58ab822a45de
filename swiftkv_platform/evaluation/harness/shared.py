"""Language model for lm-evaluation-harness on several workers. The first worker runs the harness and distributes its
requests; the others answer their shares until it ends.

Generative requests are answered by this project's engine, in the student's current mode. `parse_generation_settings`
and `Prompt.is_served` sort out those that transformers' `generate()` has to answer: beams and other searches or
constraints that `SamplingParams` lacks, a `max_length`, empty prompts, and those so long that LongRoPE or dynamic RoPE
changes its factors. The engine's weights are not copied from the student; they may be shards that FSDP gathers layer by
layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import psutil
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.loading import LoadedModel
from swiftkv_platform.engine.memory import compute_cache_bytes
from swiftkv_platform.errors import GenerationError
from swiftkv_platform.evaluation.parts import ResultStore
from swiftkv_platform.model.attention import KeyValue, Rotation
from swiftkv_platform.model.context import DecoderContext, TokenSelection
from swiftkv_platform.model.conversion import make_dense_config
from swiftkv_platform.model.decoder import LENGTH_DEPENDENT_ROPE, read_rope_parameters
from swiftkv_platform.model.deep_tokens import Bypass
from swiftkv_platform.model.tokenizers import get_end_ids
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs.base import MAX_STOP_LENGTH, MAX_STOP_STRINGS

_MAX_NUM_SEQS = 256
"""Default number of concurrent prompts; fewer if the KV cache is too small."""
_TOKENS_PER_STEP = 2048
_MEMORY_DIVISOR = 4
"""The KV cache takes at most the worker's free host memory divided by this."""
_DEFAULT_TOP_K = 50
"""Default of `generate()`."""
_FILLER_REQUEST_ID = "filler"
_SUPPORTED_SETTINGS = frozenset({"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"})
_IGNORED_SETTINGS = frozenset(
    {"eos_token_id", "bos_token_id", "pad_token_id", "max_length", "use_cache", "cache_implementation"}
    | {"transformers_version", "_from_model_config", "return_dict_in_generate"}
    | {"output_attentions", "output_hidden_states", "output_logits", "output_scores"}
)
"""Fields of a model's generation configuration that do not change tokens, or that the harness overrides."""

Progress = Callable[[], None]
"""Called after each answer."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and its sampling parameters."""

    token_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        return len(self.token_ids) + self.params.max_tokens

    def is_served(self, config: Any) -> bool:
        """Whether the engine can answer the prompt with a model of configuration `config`."""
        return bool(self.token_ids) and has_constant_rotary_factors(config, self.num_tokens)


def parse_generation_settings(
    settings: Mapping[str, Any], shipped: Any, *, until: Sequence[str], max_tokens: int, seed: int
) -> SamplingParams | None:
    """Convert the settings of a harness request to sampling parameters; None if the engine does not support one.

    Args:
        settings: settings of the request, without `until` and the number of tokens.
        shipped: the model's generation configuration, with defaults for other settings, as in `generate()`.
        until: stop strings. Those that exceed the engine's limits are applied to the finished answers.
    """
    requested = {
        **_get_non_default_settings(shipped, _IGNORED_SETTINGS),
        **{k: v for k, v in settings.items() if v is not None},
    }
    if not requested.keys() <= _SUPPORTED_SETTINGS | {"use_cache"}:
        return None
    samples = bool(requested.get("do_sample")) and float(requested.get("temperature", 1.0)) > 0.0
    choice: dict[str, Any] = {"temperature": 0.0}
    if samples:
        choice = {name: requested[name] for name in ("temperature", "top_p", "min_p") if name in requested}
        choice["top_k"] = int(requested.get("top_k", _DEFAULT_TOP_K))
    return SamplingParams(
        max_tokens=max_tokens,
        repetition_penalty=float(requested.get("repetition_penalty", 1.0)),
        stop=tuple([text for text in until if 0 < len(text) <= MAX_STOP_LENGTH][:MAX_STOP_STRINGS]),
        skip_special_tokens=False,  # a stop string may be a special token
        seed=seed,
        **choice,
    )


def _get_non_default_settings(shipped: Any, ignored: frozenset[str]) -> dict[str, Any]:
    """Return the settings of a generation configuration that differ from the defaults, except those in `ignored`."""
    defaults = shipped._get_default_generation_params()
    stated = shipped.to_diff_dict().items()
    return {k: v for k, v in stated if k not in ignored and v is not None and v != defaults.get(k)}


def compute_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of prompts and their parameters."""
    written = json.dumps([[prompt.token_ids, asdict(prompt.params)] for prompt in prompts], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EngineGenerator:
    """Generates answers with the engine, on every worker that holds the student.

    Args:
        max_num_seqs: concurrent prompts per worker; None: as many as fit.
    """

    student: Any
    tokenizer: Any
    workers: Workers
    max_num_seqs: int | None = None

    def generate(self, prompts: Sequence[Prompt], *, swiftkv: bool, progress: Progress) -> list[list[int] | str]:
        """Return this worker's answers: their tokens, including end tokens, or an error message. Collective if workers
        run in step, because each runs the same number of engine steps."""
        lengths, num_seqs = [prompt.num_tokens for prompt in prompts], self.max_num_seqs or _MAX_NUM_SEQS
        context_length = max(lengths, default=2)
        config = EngineConfig(
            max_num_seqs=num_seqs,
            # In step, each pass must run all layers: if the longest text fits, one text of a step reaches its end.
            max_num_batched_tokens=max(_TOKENS_PER_STEP, context_length),
            kv_cache_bytes=self._compute_kv_cache_bytes(lengths, num_seqs, swiftkv=swiftkv),
        )
        answers: dict[str, list[int] | str] = {}
        with open_engine(
            self.student, self.tokenizer, config, swiftkv=swiftkv, context_length=context_length
        ) as engine:
            for index, prompt in enumerate(prompts):
                engine.add_request(prompt.token_ids, prompt.params, str(index))
            while self._has_next_step(engine):
                for output in engine.step():
                    if output.finished and output.request_id != _FILLER_REQUEST_ID:
                        answers[output.request_id] = output.error or output.token_ids
                        progress()
        return [answers[str(index)] for index in range(len(prompts))]

    def _has_next_step(self, engine: LLMEngine) -> bool:
        """Whether this worker runs another step. In step with others, it may be that of a filler request."""
        if not self.workers.in_step:
            return engine.has_unfinished_requests
        if not any(self.workers.gather(engine.has_unfinished_requests)):
            return False
        if not engine.has_unfinished_requests:
            engine.add_request([0], SamplingParams(max_tokens=1, temperature=0.0), _FILLER_REQUEST_ID)
        return True

    def _compute_kv_cache_bytes(self, lengths: Sequence[int], num_seqs: int, *, swiftkv: bool) -> int | None:
        """Return the bytes for the longest concurrent texts, limited to this worker's share of host memory; None on a
        GPU, where the engine measures free memory. Collective."""
        num_local_workers = self.workers.count_local()
        if self.student.device.type == "cuda":
            return None
        config = self.student.config if swiftkv else make_dense_config(self.student.config)
        longest = sorted(lengths, reverse=True)[:num_seqs] or [2]
        total, one = (compute_cache_bytes(config, self.student.dtype, some) for some in (longest, longest[:1]))
        available: int = psutil.virtual_memory().available
        return max(one, min(total, available // _MEMORY_DIVISOR // num_local_workers))


_TOKENS_PER_BATCH = 8192
"""Default tokens of a forward pass, including padding."""
_PROMPTS_PER_ROUND = 1024
"""Prompts whose answers are stored together."""
_UNLIMITED_BATCH_SIZE = 1 << 30
_NO_COMMAND: tuple[str, Any] = ("", None)
"""Argument that the other workers pass to the broadcast by which the first worker sends its command."""


@dataclass(frozen=True)
class _RequestGroup:
    """A single request, or several with the same context, to answer together."""

    indices: list[int]
    requests: list[Any]
    num_tokens: int
    kind: str = ""
    """Groups of different kinds are in different batches."""


@dataclass
class _Batch:
    indices: list[int] = field(default_factory=list)
    """Empty for a batch that only keeps a worker in step."""
    requests: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _HarnessRequest:
    """Arguments of a harness request, without its document."""

    args: tuple[Any, ...]


@dataclass(frozen=True)
class _GenerationRequest:
    """A parsed request to generate text."""

    index: int
    until: list[str]
    prompt: Prompt | None
    """Prompt for the engine; None if only `generate()` can answer the request."""


class HarnessModel(HFLM):  # type: ignore[misc]  # the harness is untyped
    """Language model of the harness: a SwiftKV model in either mode.

    Args:
        batch_size: prompts per forward pass; None: `_TOKENS_PER_BATCH` tokens.
        progress: called on the first worker with (answered requests, total).
        parts: store of the engine's answers.
    """

    part = ""
    """Name of the current task."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        workers: Workers,
        *,
        batch_size: int | None,
        progress: Callable[[int, int], None],
        parts: ResultStore,
    ) -> None:
        # The harness passes all requests at once; this class makes the batches.
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=_UNLIMITED_BATCH_SIZE)
        self._workers = workers
        self._max_prompts = batch_size
        self._progress = progress
        self._parts = parts
        self._generator = EngineGenerator(model, tokenizer, workers, batch_size)
        self._num_answered = self._num_to_answer = 0

    def answer_assigned_requests(self) -> None:
        """Answer shares until the first worker ends the task. Raises that worker's error, if any."""
        while True:
            name, argument = self._workers.broadcast_from_first(_NO_COMMAND)
            if name == "end":
                if argument is not None:
                    raise argument
                return
            if name == "write":
                self._generate_share(argument, None)
            else:
                self._answer_share(name, argument, None)

    def end_other_workers(self, error: BaseException | None = None) -> None:
        """End `answer_assigned_requests` on the other workers; with `error`, they raise it."""
        self._workers.broadcast_from_first(("end", error))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat as training and serving do."""
        render = partial(
            ChatRenderer(self.tokenizer).render_prompt,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return render(Conversation(list(chat_history)))
        except RowError:  # some templates do not support system messages, which are then dropped
            return render(Conversation([message for message in chat_history if message["role"] != "system"]))

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
        by_context: dict[tuple[int, ...], _RequestGroup] = {}
        for index, request in enumerate(requests):
            _, context, continuation = request
            shared = (*context, *continuation[:-1])
            # With deep tokens that keep their own K and V, scores depend on the end of the prompt.
            key = (len(context), *shared) if self._model.config.layer_map.deep_leaders else shared
            piece = by_context.setdefault(key, _RequestGroup([], [], len(shared)))
            piece.indices.append(index)
            piece.requests.append(request)
        return self._answer_on_all_workers("loglikelihood", list(by_context.values()), len(requests))

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        asked = [self._parse_request(index, *request.args) for index, request in enumerate(requests)]
        answers: list[str] = [""] * len(requests)
        served = [one for one in asked if one.prompt is not None]
        for one, tokens in zip(
            served, self._generate_with_engine([one.prompt for one in served if one.prompt]), strict=True
        ):
            answers[one.index] = postprocess_generated_text(self.tok_decode(tokens), one.until, None)
        others = [one.index for one in asked if one.prompt is None]
        for index, answer in zip(
            others, self._generate_with_transformers([requests[index] for index in others]), strict=True
        ):
            answers[index] = answer
        return answers

    def generate_texts(self, prompts: Sequence[str], *, max_tokens: int, until: Sequence[str]) -> list[str]:
        """Return greedy answers to rendered prompts in the model's current mode."""
        settings = {"max_gen_toks": max_tokens, "until": list(until), "do_sample": False}
        return self.generate_until([_HarnessRequest((prompt, dict(settings))) for prompt in prompts])

    def _parse_request(self, index: int, context: str, settings: dict[str, Any]) -> _GenerationRequest:
        """Parse a request in the way of the harness."""
        left = normalize_gen_kwargs(settings, self.max_gen_toks)
        until = handle_stop_sequences(
            left.pop("until", None), self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        max_tokens = left.pop("max_gen_toks")
        max_prompt_tokens = self.max_length - max_tokens
        if max_prompt_tokens <= 0:
            raise ValueError(
                f"max_gen_toks is {max_tokens}, but the model's context has {self.max_length} tokens with the prompt; "
                "use a smaller max_gen_toks"
            )
        params = parse_generation_settings(
            left, self._model.generation_config, until=until, max_tokens=max_tokens, seed=index
        )
        if params is None:
            return _GenerationRequest(index, until, None)
        token_ids, _ = self.tok_batch_encode([context], left_truncate_len=max_prompt_tokens, truncation=self.truncation)
        prompt = Prompt(tuple(token_ids[0].tolist()), params)
        return _GenerationRequest(index, until, prompt if prompt.is_served(self._model.config) else None)

    def _generate_with_engine(self, prompts: list[Prompt]) -> list[list[int]]:
        """Return the engine's answers as tokens, generated and stored in rounds."""
        mode: bool = self._model.model.swiftkv_enabled
        rounds = [prompts[start : start + _PROMPTS_PER_ROUND] for start in range(0, len(prompts), _PROMPTS_PER_ROUND)]
        names = [f"{self.part}-{'student' if mode else 'teacher'}-{compute_digest(some)}" for some in rounds]
        kept = [self._parts.load_result(name) for name in names]
        shares = [
            # Neighbors may share a prefix.
            [
                [(i, some[i]) for i in sorted(own)]
                for own in _balance_items([one.num_tokens for one in some], self._workers.size)
            ]
            for some in rounds
        ]
        self._num_answered = 0
        self._num_to_answer = sum(len(share[0]) for share, known in zip(shares, kept, strict=True) if known is None)
        answers: list[list[int]] = []
        for name, known, share in zip(names, kept, shares, strict=True):
            written = known
            if written is None:
                self._workers.broadcast_from_first(("write", mode))
                written = _merge_answers(self._generate_share(mode, share))
                self._parts.store_result(name, written)
            answers += json.loads(written)
        return answers

    def _generate_share(
        self, mode: bool, shares: list[list[tuple[int, Prompt]]] | None
    ) -> list[list[tuple[int, list[int] | str]]]:
        """Generate this worker's share. Returns (index of the prompt, tokens or text) by worker, on the first one."""
        mine = self._workers.scatter(shares)
        written = self._generator.generate([prompt for _, prompt in mine], swiftkv=mode, progress=self._count_answer)
        return self._workers.gather([(index, answer) for (index, _), answer in zip(mine, written, strict=True)])

    def _count_answer(self) -> None:
        self._num_answered += 1
        if self._workers.is_first:
            self._progress(self._num_answered, self._num_to_answer)

    def _generate_with_transformers(self, requests: list[Any]) -> list[str]:
        """Answer requests that the engine does not support with `generate()`."""
        if not requests:
            return []
        pieces = []
        for index, request in enumerate(requests):
            context, settings = request.args
            num_tokens = len(self.tok_encode(context)) + int(settings.get("max_gen_toks", self.max_gen_toks))
            pieces.append(_RequestGroup([index], [_HarnessRequest(request.args)], num_tokens, repr(settings)))
        return self._answer_on_all_workers("generate", pieces, len(requests))

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        generated: torch.Tensor = super()._model_generate(*args, **kwargs, synced_gpus=self._workers.in_step)
        return generated

    def _answer_on_all_workers(self, name: str, pieces: list[_RequestGroup], total: int) -> list[Any]:
        """Answer `pieces` on all workers; return the answers in the order of the requests."""
        command = name, self._model.model.swiftkv_enabled
        self._workers.broadcast_from_first(command)
        shares = distribute_requests(pieces, self._workers, self._max_prompts)
        answers: list[Any] = [None] * total
        for worker in self._answer_share(*command, shares):
            for index, answer in worker:
                answers[index] = answer
        return answers

    def _answer_share(self, name: str, mode: bool, shares: list[list[_Batch]] | None) -> list[list[tuple[int, Any]]]:
        """Answer this worker's share. Returns (index of the request, answer) by worker, on the first one."""
        self._model.swiftkv(mode)
        mine = self._workers.scatter(shares)
        total, answered = sum(len(batch.indices) for batch in mine), list[tuple[int, Any]]()
        for batch in mine:
            if name == "generate":
                answers = super().generate_until(batch.requests, disable_tqdm=True)
            elif self._model.config.layer_map.deep_leaders:
                answers = self._score_continuations(batch.requests)
            else:
                answers = super()._loglikelihood_tokens(batch.requests, disable_tqdm=True)
            if batch.indices:
                answered += zip(batch.indices, answers, strict=True)
            if self._workers.is_first:
                self._progress(len(answered), total)
        return self._workers.gather(answered)

    @torch.no_grad()
    def _score_continuations(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Score continuations like the harness: log-probability, and whether greedy decoding generates them. Contexts
        are passed as prompts, because students with deep tokens treat prompts differently."""
        texts = [(*context, *continuation)[-(self.max_length + 1) :][:-1] for _, context, continuation in requests]
        padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        sizes = [len(continuation) for _, _, continuation in requests]
        prompts = torch.tensor([len(text) - size + 1 for text, size in zip(texts, sizes, strict=True)])
        inputs, prompts = padded.to(self.device), prompts.to(self.device)
        logits = self._model(inputs, prompt_length=prompts, use_cache=False).logits
        answers = []
        for (_, _, continuation), text, size, row in zip(requests, texts, sizes, logits, strict=True):
            found = row[len(text) - size : len(text)].log_softmax(-1, dtype=torch.float32)
            tokens = torch.tensor(continuation, device=found.device)
            chosen = found.gather(1, tokens[:, None])
            answers.append((float(chosen.sum()), bool((found.argmax(-1) == tokens).all())))
        return answers


def distribute_requests(
    pieces: Sequence[_RequestGroup], workers: Workers, max_prompts: int | None
) -> list[list[_Batch]]:
    """Distribute groups of requests to workers in batches of about equal tokens; in step, all get the same number of
    batches."""
    shares: list[list[_Batch]] = [[] for _ in range(workers.size)]
    for _, group in groupby(sorted(pieces, key=lambda piece: piece.kind), key=lambda piece: piece.kind):
        same = list(group)
        for share, own in zip(shares, _balance_items([piece.num_tokens for piece in same], workers.size), strict=True):
            share.extend(_make_batches([same[i] for i in own], max_prompts))
    if workers.in_step:
        shortest = min((batch for share in shares for batch in share), key=lambda batch: len(batch.requests))
        longest = max(len(share) for share in shares)
        for share in shares:
            share.extend([_Batch([], shortest.requests)] * (longest - len(share)))
    return shares


def _balance_items(lengths: Sequence[int], num_workers: int) -> list[list[int]]:
    """Distribute items with `lengths` tokens to workers, with about equal tokens. Return each worker's indices, from
    the longest item to the shortest: they are assigned in alternating order of workers."""
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    for n, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        cycle, rank = divmod(n, num_workers)
        shares[rank if cycle % 2 == 0 else num_workers - 1 - rank].append(index)
    return shares


def _merge_answers(shares: list[list[tuple[int, list[int] | str]]]) -> bytes:
    """Return all workers' answers in order, as JSON. Raises `GenerationError` if an answer failed."""
    answers = [answer for _, answer in sorted(answer for share in shares for answer in share)]
    for answer in answers:
        if isinstance(answer, str):
            raise GenerationError(answer)
    return json.dumps(answers).encode()


def _make_batches(pieces: Sequence[_RequestGroup], max_prompts: int | None) -> Iterator[_Batch]:
    """Yield batches of consecutive groups, longest first, up to a number of prompts or of tokens."""
    batch, prompts_left = _Batch(), 0
    for piece in pieces:
        if not prompts_left:
            if batch.requests:
                yield batch
            batch, prompts_left = _Batch(), max_prompts or max(1, _TOKENS_PER_BATCH // max(piece.num_tokens, 1))
        batch.indices += piece.indices
        batch.requests += piece.requests
        prompts_left -= 1
    if batch.requests:
        yield batch


_IN_MEMORY_DIGEST = "in memory"
"""Digest of the weights. Cached blocks do not outlive the engine, so it need not be unique."""


@contextmanager
def open_engine(
    student: Any, tokenizer: Any, config: EngineConfig, *, swiftkv: bool, context_length: int
) -> Iterator[LLMEngine]:
    """Yield an engine on `student`, whose attention implementation is restored when the block ends.

    Args:
        swiftkv: True: student mode; False: teacher mode.
        context_length: max tokens of prompt and output together, see `has_constant_rotary_factors`.
    """
    own = student.config._attn_implementation
    model: Any = student if swiftkv else _TeacherModel(student)
    loaded = LoadedModel(
        config=model.config,
        tokenizer=tokenizer,
        eos_token_ids=get_end_ids(student.generation_config.eos_token_id),
        context_length=context_length,
        model=model,
        digest=_IN_MEMORY_DIGEST,
    )
    try:
        yield LLMEngine(loaded, config)
    finally:
        model.set_attn_implementation(own)


def has_constant_rotary_factors(config: Any, num_tokens: int) -> bool:
    """Whether all sequences of up to `num_tokens` tokens have the same rotary factors, as the engine requires. LongRoPE
    and dynamic RoPE have other factors for long sequences."""
    return all(
        num_tokens <= int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in read_rope_parameters(config).values()
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE
    )


class _TeacherDecoder:
    """The teacher's layers with the interface of a dense model's decoder, where l is the number of layers."""

    def __init__(self, decoder: Any, layer_map: Any) -> None:
        self._decoder = decoder
        self.layer_map = layer_map
        self.layers = decoder.layers
        self.embed_tokens = decoder.embed_tokens
        self.make_rotations = decoder.make_rotations

    @property
    def decoders(self) -> list[Any]:
        """The student's decoder, and the decoders with the original layers if the student's layers are trained."""
        functions = (self._decoder.run_teacher_lower, self._decoder.run_teacher_upper)
        owners = [getattr(function, "__self__", None) for function in functions]
        return [self._decoder, *(owner for owner in owners if owner is not None)]

    def run_lower_layers(self, context: DecoderContext, _bypass: Bypass | None = None) -> torch.Tensor:
        """Run all layers. `_bypass` is ignored, since a teacher's tokens bypass no layers."""
        x = (self._decoder.run_teacher_lower or self._decoder.run_lower_layers)(context)
        hidden: torch.Tensor = self._decoder.run_teacher_upper(x, context)
        return hidden

    def project_key_values(self, _x: torch.Tensor, _rotation: Rotation) -> list[KeyValue]:
        return []

    def run_student_upper(
        self,
        x: torch.Tensor,
        _context: DecoderContext,
        *,
        shared: Sequence[Any],
        selection: TokenSelection | None = None,
        deep: None = None,
    ) -> torch.Tensor:
        assert not shared, "a teacher's layers compute their own K and V"
        assert deep is None
        return x if selection is None else selection.select(x)


class _TeacherModel:
    """A student's teacher, with the attributes of a model that the engine uses."""

    def __init__(self, student: Any) -> None:
        self.config = make_dense_config(student.config)
        self.model = _TeacherDecoder(student.model, self.config.layer_map)
        self.lm_head = student.lm_head
        self.device, self.dtype = student.device, student.dtype

    def set_attn_implementation(self, name: str) -> None:
        for decoder in self.model.decoders:
            decoder.set_attn_implementation(name)
