"""Language model of lm-evaluation-harness that several workers share. The first worker runs the harness and distributes
its requests; the others answer their shares until it ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.errors import GenerationError
from swiftkv_platform.evaluation.harness.generation import Prompt, Writer, digest, read_settings
from swiftkv_platform.evaluation.parts import Parts
from swiftkv_platform.model.workers import Workers

_TOKENS_PER_BATCH = 8192
"""Tokens of a forward pass, padding included, if the spec gives no number of prompts."""
_PROMPTS_PER_ROUND = 1024
"""Prompts of all workers whose engine answers are stored together."""
_EVERYTHING = 1 << 30
_NOTHING: tuple[str, Any] = ("", None)
"""Placeholder that listening workers pass to `from_first`."""


@dataclass(frozen=True)
class _Piece:
    """Requests to answer together: a single one, or several with the same context."""

    indices: list[int]
    requests: list[Any]
    num_tokens: int
    kind: str = ""
    """Pieces of different kinds go into different batches."""


@dataclass
class _Batch:
    indices: list[int] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    counts: bool = True
    """False for a batch that keeps a worker in step with the others."""


@dataclass(frozen=True)
class _Request:
    """Arguments of a request, without its document."""

    args: tuple[Any, ...]


@dataclass(frozen=True)
class _Asked:
    """A request to generate."""

    index: int
    until: list[str]
    prompt: Prompt | None
    """Prompt for the engine; None if it cannot answer the request."""


class SharedModel(HFLM):  # type: ignore[misc]  # the harness is untyped
    """Both modes of a SwiftKV model as a language model of the harness.

    Args:
        batch_size: prompts a forward pass; None: as many as make `_TOKENS_PER_BATCH` tokens.
        progress: called on the first worker with the answered requests and their total.
        parts: stores the engine's answers.
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
        parts: Parts,
    ) -> None:
        # The harness passes all requests at once; batches are made here.
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=_EVERYTHING)
        self._workers = workers
        self._most_prompts = batch_size
        self._progress = progress
        self._parts = parts
        self._writer = Writer(model, tokenizer, workers, batch_size)
        self._told = self._to_tell = 0

    def follow(self) -> None:
        """Answer shares until the first worker ends the task; raises the error that stopped it, if any."""
        while True:
            name, argument = self._workers.from_first(_NOTHING)
            if name == "end":
                if argument is not None:
                    raise argument
                return
            if name == "write":
                self._write_share(argument, None)
            else:
                self._answer_share(name, argument, None)

    def end(self, error: BaseException | None = None) -> None:
        """Release the others; with `error`, they raise it."""
        self._workers.from_first(("end", error))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat as training and serving do."""
        render = partial(
            ChatRenderer.for_tokenizer(self.tokenizer).render_prompt,
            asks=add_generation_prompt,
            goes_on=not add_generation_prompt,
        )
        try:
            return render(Conversation(list(chat_history)))
        except RowError:  # some templates take no system message, which is then left out
            return render(Conversation([message for message in chat_history if message["role"] != "system"]))

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
        by_context: dict[tuple[int, ...], _Piece] = {}
        for index, request in enumerate(requests):
            _, context, continuation = request
            shared = (*context, *continuation[:-1])
            # The end of the prompt matters if deep tokens keep their own K and V.
            key = (len(context), *shared) if self._model.config.decodes_own else shared
            piece = by_context.setdefault(key, _Piece([], [], len(shared)))
            piece.indices.append(index)
            piece.requests.append(request)
        return self._deal("loglikelihood", list(by_context.values()), len(requests))

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        asked = [self._read(index, *request.args) for index, request in enumerate(requests)]
        answers: list[str] = [""] * len(requests)
        served = [one for one in asked if one.prompt is not None]
        for one, tokens in zip(served, self._write([one.prompt for one in served if one.prompt]), strict=True):
            answers[one.index] = postprocess_generated_text(self.tok_decode(tokens), one.until, None)
        others = [one.index for one in asked if one.prompt is None]
        for index, answer in zip(others, self._generate([requests[index] for index in others]), strict=True):
            answers[index] = answer
        return answers

    def _read(self, index: int, context: str, settings: dict[str, Any]) -> _Asked:
        """Parse a request as the harness does when it generates for a single one."""
        left = normalize_gen_kwargs(settings, self.max_gen_toks)
        until = handle_stop_sequences(
            left.pop("until", None), self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        max_tokens = left.pop("max_gen_toks")
        room = self.max_length - max_tokens
        if room <= 0:
            raise ValueError(
                f"max_gen_toks is {max_tokens}, but the model's context of {self.max_length} tokens must also hold a "
                "prompt: use fewer"
            )
        params = read_settings(left, self._model.generation_config, until=until, max_tokens=max_tokens, seed=index)
        if params is None:
            return _Asked(index, until, None)
        token_ids, _ = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)
        prompt = Prompt(tuple(token_ids[0].tolist()), params)
        return _Asked(index, until, prompt if prompt.is_served(self._model.config) else None)

    def _write(self, prompts: list[Prompt]) -> list[list[int]]:
        """Return the engine's answers as tokens. They are written and stored in rounds."""
        mode: bool = self._model.model.swiftkv_enabled
        rounds = [prompts[start : start + _PROMPTS_PER_ROUND] for start in range(0, len(prompts), _PROMPTS_PER_ROUND)]
        names = [f"{self.part}-{'student' if mode else 'teacher'}-{digest(some)}" for some in rounds]
        kept = [self._parts.get(name) for name in names]
        shares = [_shares(some, self._workers.size) for some in rounds]
        self._told = 0
        self._to_tell = sum(len(share[0]) for share, known in zip(shares, kept, strict=True) if known is None)
        answers: list[list[int]] = []
        for name, known, share in zip(names, kept, shares, strict=True):
            written = known
            if written is None:
                self._workers.from_first(("write", mode))
                written = _in_order(self._write_share(mode, share))
                self._parts.put(name, written)
            answers += json.loads(written)
        return answers

    def _write_share(
        self, mode: bool, shares: list[list[tuple[int, Prompt]]] | None
    ) -> list[list[tuple[int, list[int] | str]]]:
        mine = self._workers.scatter(shares)
        written = self._writer.write([prompt for _, prompt in mine], swiftkv=mode, progress=self._tell)
        return self._workers.gather([(index, answer) for (index, _), answer in zip(mine, written, strict=True)])

    def _tell(self) -> None:
        self._told += 1
        if self._workers.is_first:
            self._progress(self._told, self._to_tell)

    def _generate(self, requests: list[Any]) -> list[str]:
        """Answer by `generate()` the requests that the engine cannot serve."""
        if not requests:
            return []
        pieces = []
        for index, request in enumerate(requests):
            context, settings = request.args
            num_tokens = len(self.tok_encode(context)) + int(settings.get("max_gen_toks", self.max_gen_toks))
            pieces.append(_Piece([index], [_Request(request.args)], num_tokens, repr(settings)))
        return self._deal("generate", pieces, len(requests))

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        generated: torch.Tensor = super()._model_generate(*args, **kwargs, synced_gpus=self._workers.in_step)
        return generated

    def _deal(self, name: str, pieces: list[_Piece], total: int) -> list[Any]:
        """Have every worker answer its share of `pieces`. Answers are in the order of the requests."""
        command = name, self._model.model.swiftkv_enabled
        self._workers.from_first(command)
        shares = deal(pieces, self._workers, self._most_prompts)
        answers: list[Any] = [None] * total
        for worker in self._answer_share(*command, shares):
            for index, answer in worker:
                answers[index] = answer
        return answers

    def _answer_share(self, name: str, mode: bool, shares: list[list[_Batch]] | None) -> list[list[tuple[int, Any]]]:
        self._model.swiftkv(mode)
        mine = self._workers.scatter(shares)
        total, answered = sum(len(batch.indices) for batch in mine), list[tuple[int, Any]]()
        for batch in mine:
            if name == "generate":
                answers = super().generate_until(batch.requests, disable_tqdm=True)
            elif self._model.config.decodes_own:
                answers = self._score(batch.requests)
            else:
                answers = super()._loglikelihood_tokens(batch.requests, disable_tqdm=True)
            if batch.counts:
                answered += zip(batch.indices, answers, strict=True)
            if self._workers.is_first:
                self._progress(len(answered), total)
        return self._workers.gather(answered)

    @torch.no_grad()
    def _score(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Score continuations as the harness does: log-probability, and whether greedy decoding gives it. Contexts are
        passed as prompts, which a student with deep tokens has to tell apart."""
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


def deal(pieces: Sequence[_Piece], workers: Workers, most_prompts: int | None) -> list[list[_Batch]]:
    """Distribute pieces to workers in batches, with about equal tokens; in step, with equal numbers of batches."""
    shares: list[list[_Batch]] = [[] for _ in range(workers.size)]
    by_kind = sorted(pieces, key=lambda piece: (piece.kind, -piece.num_tokens))
    for _, group in groupby(by_kind, key=lambda piece: piece.kind):
        same = list(group)
        for rank, share in enumerate(shares):
            # Back and forth: the first batch of every worker is the longest.
            own = [p for n, p in enumerate(same) if rank == _place(n, workers.size)]
            share.extend(_batches(own, most_prompts))
    if workers.in_step:
        shortest = min((batch for share in shares for batch in share), key=lambda batch: len(batch.requests))
        longest = max(len(share) for share in shares)
        for share in shares:
            idle = _Batch([], shortest.requests, counts=False)
            share.extend([idle] * (longest - len(share)))
    return shares


def _shares(prompts: Sequence[Prompt], num_workers: int) -> list[list[tuple[int, Prompt]]]:
    """Distribute prompts with their indices to workers, with about equal tokens."""
    by_length = sorted(enumerate(prompts), key=lambda one: -one[1].num_tokens)
    shares: list[list[tuple[int, Prompt]]] = [[] for _ in range(num_workers)]
    for n, one in enumerate(by_length):
        shares[_place(n, num_workers)].append(one)
    return [sorted(share, key=lambda one: one[0]) for share in shares]  # neighbours may share a prefix


def _in_order(shares: list[list[tuple[int, list[int] | str]]]) -> bytes:
    """Return all workers' answers in order, as JSON. Raises `GenerationError` if one failed."""
    answers = [answer for _, answer in sorted(answer for share in shares for answer in share)]
    for answer in answers:
        if isinstance(answer, str):
            raise GenerationError(answer)
    return json.dumps(answers).encode()


def _place(n: int, size: int) -> int:
    turn, place = divmod(n, size)
    return place if turn % 2 == 0 else size - 1 - place


def _batches(pieces: Sequence[_Piece], most_prompts: int | None) -> Iterator[_Batch]:
    """Yield batches of neighbouring pieces, the longest first, up to a number of prompts or of tokens."""
    batch, room = _Batch(), 0
    for piece in pieces:
        if not room:
            if batch.requests:
                yield batch
            batch, room = _Batch(), most_prompts or max(1, _TOKENS_PER_BATCH // max(piece.num_tokens, 1))
        batch.indices += piece.indices
        batch.requests += piece.requests
        room -= 1
    if batch.requests:
        yield batch
