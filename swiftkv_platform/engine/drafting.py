"""How many tokens are worth drafting, and which ones the text so far suggests. Knows no tensor, no model, no queue.

A draft costs a share of a pass, which every sequence of the step waits for, and brings its own sequence one token if it
is accepted. So it is worth its cost where

    probability that it is accepted > its cost in passes x sequences of the step that get a token

The probability is a running one, by sequence and source. Where drafting does not pay, nothing is observed; the estimate
then drifts back to where it began, so that drafting is tried again, at most every few dozen tokens. The text never
depends on any of this.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

MIN_NGRAM, MAX_NGRAM = 2, 4
"""Tokens at the end of the text that must have occurred before; the longest match is taken."""
DECAY, DRIFT = 0.9, 0.97
"""What remains of older observations with each new one, and with each token that was not drafted for."""


@dataclass(frozen=True)
class Draft:
    """Tokens to verify beyond the last known one. Their KV slots are allocated."""

    token_ids: tuple[int, ...] = ()
    """Found in the text: they run together with the last known token."""
    num_exit_tokens: int = 0
    """Most tokens that the exit head may draft, one after another; never both."""

    @property
    def size(self) -> int:
        """Tokens it may come to."""
        return len(self.token_ids) + self.num_exit_tokens

    def limited(self, size: int) -> Draft:
        """At most `size` tokens of it."""
        return Draft(self.token_ids[:size], min(self.num_exit_tokens, size))


NO_DRAFT = Draft()


@dataclass(frozen=True)
class DraftCosts:
    """In units of a pass that gives each sequence one token, while it is bound by reading weights."""

    lower: float
    """The layers below l, which a draft of the exit head runs alone."""
    exit_head: float
    """One evaluation."""
    row: float
    """One token more in a pass."""
    max_step_tokens: int
    """A step with more tokens is bound by arithmetic; none of them is free, and nothing is drafted."""


class Estimate:
    """A running share, which drifts to where it began while nothing is observed."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = self._trials = 0.0

    @property
    def value(self) -> float:
        return (self._prior + self._hits) / (1.0 + self._trials)

    def observe(self, hits: int, trials: int) -> None:
        """Count `hits` of `trials`."""
        if trials:
            self._hits, self._trials = self._hits * DECAY + hits, self._trials * DECAY + trials

    def drift(self) -> None:
        """A token went by without a trial."""
        self._hits, self._trials = self._hits * DRIFT, self._trials * DRIFT


class PromptLookup:
    """Where each n-gram of a text that only grows occurred last."""

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after it
        self._num_indexed = 0

    def propose(self, token_ids: Tokens[int], size: int) -> tuple[int, ...]:
        """`size` tokens that followed the longest end of the text that occurred before, where it did so last; a text
        that ends within them is taken to repeat itself. Empty where no end did."""
        for at in range(self._num_indexed, len(token_ids)):
            for length in range(MIN_NGRAM, min(MAX_NGRAM, at) + 1):
                self._followers[tuple(token_ids[at - length : at])] = at
        self._num_indexed = len(token_ids)
        for length in range(min(MAX_NGRAM, len(token_ids)), MIN_NGRAM - 1, -1):
            start = self._followers.get(tuple(token_ids[-length:]))
            if start is not None:
                proposed = list(token_ids[start : start + size])
                period = len(token_ids) - start
                while len(proposed) < size:
                    proposed.append(proposed[len(proposed) - period])
                return tuple(proposed)
        return ()


class DraftHistory:
    """What drafting has come to in one sequence."""

    def __init__(self) -> None:
        self.lookup = PromptLookup()
        self.lookup_accepted = Estimate(0.7)
        self.exit_accepted = Estimate(0.9)
        self.exit_confident = Estimate(0.9)
        """Share of the exit head's evaluations that reached the threshold."""

    def observe(self, *, from_text: bool, num_drafts: int, num_accepted: int) -> None:
        """Drafts up to the first one that was not accepted are trials."""
        estimate = self.lookup_accepted if from_text else self.exit_accepted
        estimate.observe(num_accepted, min(num_accepted + 1, num_drafts))


def lookup_size(history: DraftHistory, costs: DraftCosts, num_sequences: int, limit: int) -> int:
    """Tokens from the text that are worth a row each; the n-th is accepted if all before it are."""
    accepted, probability, size = history.lookup_accepted.value, 1.0, 0
    while size < limit and (probability := probability * accepted) > costs.row * num_sequences:
        size += 1
    return size


def exit_head_pays(history: DraftHistory, costs: DraftCosts, num_sequences: int, num_drafting: int) -> bool:
    """Whether to look at the exit head at all: sequences that draft together share what it costs the others."""
    share = num_sequences / num_drafting
    gain = history.exit_accepted.value - (costs.lower + costs.row) * share
    return history.exit_confident.value * gain > costs.exit_head * share


def another_pass_pays(histories: Tokens[DraftHistory], costs: DraftCosts, num_sequences: int, num_drafted: int) -> bool:
    """Whether to run the drafts, one of each sequence of `histories`, that `num_drafted` others came before."""
    expected = sum(history.exit_accepted.value ** (num_drafted + 1) for history in histories)
    return expected > (costs.lower + costs.row * len(histories)) * num_sequences
