"""A language model of lm-evaluation-harness whose requests several workers answer. The first worker runs the harness
and deals what it asks for; the others answer their shares until it has ended. Knows requests, no task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from swiftkv_platform.model.workers import Workers

_TOKENS_PER_BATCH = 8192
"""Tokens of a forward pass, padding included, where the spec gives no number of prompts."""
_EVERYTHING = 1 << 30
_NOTHING: tuple[str, Any] = ("", None)
"""Said by those who listen."""


@dataclass(frozen=True)
class _Piece:
    """Requests that are answered together: they share a context, or there is one."""

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
    """A request's arguments, without the document that it was made of."""

    args: tuple[Any, ...]


class SharedModel(HFLM):  # type: ignore[misc]  # the harness is untyped
    """Both modes of a SwiftKV model.

    Args:
        batch_size: prompts a forward pass; None: as many as make `_TOKENS_PER_BATCH` tokens.
        progress: told on the first worker how many of its requests are answered.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        workers: Workers,
        *,
        batch_size: int | None,
        progress: Callable[[int, int], None],
    ) -> None:
        # The harness hands over everything at once; batches are made here.
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=_EVERYTHING)
        self._workers = workers
        self._most_prompts = batch_size
        self._progress = progress

    def follow(self) -> None:
        """Answer shares until the first worker ends it; raises what stopped that one."""
        while True:
            name, argument = self._workers.from_first(_NOTHING)
            if name == "end":
                if argument is not None:
                    raise argument
                return
            self._answer_share(name, argument, None)

    def end(self, error: BaseException | None = None) -> None:
        """Release the others; with `error`, they raise it."""
        self._workers.from_first(("end", error))

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[Any]:
        by_context: dict[tuple[int, ...], _Piece] = {}
        for index, request in enumerate(requests):
            _, context, continuation = request
            shared = (*context, *continuation[:-1])
            piece = by_context.setdefault(shared, _Piece([], [], len(shared)))
            piece.indices.append(index)
            piece.requests.append(request)
        return self._deal("loglikelihood", list(by_context.values()), len(requests))

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
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
        """Have every worker answer its share of `pieces`; answers come in the order of the requests."""
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
            else:
                answers = super()._loglikelihood_tokens(batch.requests, disable_tqdm=True)
            if batch.counts:
                answered += zip(batch.indices, answers, strict=True)
            if self._workers.is_first:
                self._progress(len(answered), total)
        return self._workers.gather(answered)


def deal(pieces: Sequence[_Piece], workers: Workers, most_prompts: int | None) -> list[list[_Batch]]:
    """Batches for each worker, each about as many tokens; in step, each as many batches."""
    shares: list[list[_Batch]] = [[] for _ in range(workers.size)]
    by_kind = sorted(pieces, key=lambda piece: (piece.kind, -piece.num_tokens))
    for _, group in groupby(by_kind, key=lambda piece: piece.kind):
        same = list(group)
        for rank, share in enumerate(shares):
            # There and back again: the first of every round is the longest.
            own = [p for n, p in enumerate(same) if rank == _place(n, workers.size)]
            share.extend(_batches(own, most_prompts))
    if workers.in_step:
        shortest = min((batch for share in shares for batch in share), key=lambda batch: len(batch.requests))
        longest = max(len(share) for share in shares)
        for share in shares:
            idle = _Batch([], shortest.requests, counts=False)
            share.extend([idle] * (longest - len(share)))
    return shares


def _place(n: int, size: int) -> int:
    turn, place = divmod(n, size)
    return place if turn % 2 == 0 else size - 1 - place


def _batches(pieces: Sequence[_Piece], most_prompts: int | None) -> Iterator[_Batch]:
    """Neighbours together, the longest first, up to a number of prompts or of tokens."""
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
