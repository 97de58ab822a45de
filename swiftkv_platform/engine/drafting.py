"""Number of tokens worth drafting, and the ones that the text so far suggests. Knows no tensor, no model, no queue.

A draft costs a share of a pass, which every sequence of the step waits for, and brings its own sequence one token if it
is accepted. So it is worth its cost where

    probability that it is accepted > its cost in passes x sequences of the step that get a token

For what the text suggests the probability is a running share, by sequence. For the exit head it is the head's own
confidence, its odds times a factor that is learned from what became of its drafts: a head that spreads its probability
over several tokens still has the right one first far more often than it says. Where drafting does not pay, nothing is
observed; what was learned then fades, so that drafting is tried again, at most every few dozen tokens. The text never
depends on any of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

MIN_NGRAM, MAX_NGRAM = 2, 4
"""Tokens at the end of the text that must have occurred before; the longest match is taken."""
DECAY, DRIFT = 0.9, 0.97
"""Share of older observations that remains with each new one, and with each token that was not drafted for."""
MOST_SHIFT = 4.0
"""Bound of what is learned, in log-odds."""
HIGHEST_CONFIDENCE = 0.95
"""Bound of the exit head's confidence before its drafts have proved more."""


@dataclass(frozen=True)
class Draft:
    """Tokens to verify beyond the last known one. Their KV slots are allocated."""

    token_ids: tuple[int, ...] = ()
    """Found in the text: they run together with the last known token."""
    num_exit_tokens: int = 0
    """Most tokens that the exit head may draft, one after another; never both."""

    @property
    def size(self) -> int:
        return len(self.token_ids) + self.num_exit_tokens

    def limited(self, size: int) -> Draft:
        return Draft(self.token_ids[:size], min(self.num_exit_tokens, size))


NO_DRAFT = Draft()


@dataclass(frozen=True)
class DraftCosts:
    """Costs in units of a pass that gives each sequence one token, while it is bound by reading weights."""

    lower: float
    """The layers below l, which a draft of the exit head runs alone."""
    exit_head: float
    """One evaluation."""
    row: float
    """One token more in a pass."""
    max_step_tokens: int
    """A step with more tokens is bound by arithmetic; none of them is free, and nothing is drafted."""


class RunningShare:
    """A running share, which drifts to where it began while nothing is observed."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = self._trials = 0.0

    @property
    def value(self) -> float:
        return (self._prior + self._hits) / (1.0 + self._trials)

    def observe(self, hits: float, trials: float) -> None:
        if trials:
            self._hits, self._trials = self._hits * DECAY + hits, self._trials * DECAY + trials

    def drift(self) -> None:
        self._hits, self._trials = self._hits * DRIFT, self._trials * DRIFT


class Reliability:
    """Shift of the log-odds of the exit head's confidence: above 0 where it is right more often than it says.

    Learned draft by draft, by steps up the likelihood of what became of them.

    Args:
        rate: of a step.
        drift: what remains of it with each token that was not drafted for.
        common: that of the whole engine, which this one is relative to and which learns from the same drafts.
    """

    def __init__(self, rate: float, drift: float, common: Reliability | None = None) -> None:
        self._rate, self._drift, self.common = rate, drift, common
        self._own = 0.0

    @property
    def shift(self) -> float:
        return self._own + (self.common.shift if self.common else 0.0)

    def acceptance(self, confidence: float) -> float:
        """Probability that a draft of this confidence is accepted; 0 stays 0."""
        if not confidence > 0.0:
            return 0.0
        odds = 1.0 / min(confidence, HIGHEST_CONFIDENCE) - 1.0
        return 1.0 / (1.0 + odds * math.exp(-self.shift))

    def observe(self, confidence: float, *, accepted: bool) -> None:
        expected = self.acceptance(confidence)
        self._learn((accepted - expected) / (expected * (1.0 - expected) + 0.25))

    def drift(self) -> None:
        self._own *= self._drift
        if self.common:
            self.common.drift()

    def _learn(self, step: float) -> None:
        self._own = max(-MOST_SHIFT, min(MOST_SHIFT, self._own + self._rate * step))
        if self.common:
            self.common._learn(step)


def common_reliability() -> Reliability:
    """Return the reliability of an engine's exit head, slow to learn and to forget."""
    return Reliability(0.1, 0.999)


class PromptLookup:
    """Last occurrence of each n-gram of a text that only grows."""

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
    """Results of drafting in one sequence."""

    def __init__(self) -> None:
        self.lookup = PromptLookup()
        self.lookup_accepted = RunningShare(0.7)
        self.exit_reliability = Reliability(0.4, 0.99)
        self.exit_gain = RunningShare(0.2)
        """Passes that an evaluation of the exit head saves, its own cost aside."""
        self.exit_confidences: list[float] = []
        """Confidences of the drafts under way."""

    def follow(self, common: Reliability) -> None:
        """Begin with what the engine has learned of its exit head."""
        if self.exit_reliability.common is not common:
            self.exit_reliability = Reliability(0.4, 0.99, common)

    def observe(self, *, from_text: bool, num_drafts: int, num_accepted: int) -> None:
        num_tried = min(num_accepted + 1, num_drafts)
        if from_text:
            self.lookup_accepted.observe(num_accepted, num_tried)
        else:
            for at, confidence in enumerate(self.exit_confidences[:num_tried]):
                self.exit_reliability.observe(confidence, accepted=at < num_accepted)

    def observe_exit_head(self, gain: float) -> None:
        """An evaluation led to a draft that is expected to save `gain` passes, or to none."""
        self.exit_gain.observe(gain, 1.0)
        if not gain:
            self.exit_reliability.drift()

    def drift_exits(self) -> None:
        """A token went by without an evaluation of the exit head."""
        self.exit_reliability.drift()
        self.exit_gain.drift()


def lookup_size(history: DraftHistory, costs: DraftCosts, num_sequences: int, limit: int) -> int:
    """Tokens from the text that are worth a row each; the n-th is accepted if all before it are."""
    accepted, probability, size = history.lookup_accepted.value, 1.0, 0
    while size < limit and (probability := probability * accepted) > costs.row * num_sequences:
        size += 1
    return size


def exit_head_pays(history: DraftHistory, costs: DraftCosts, num_sequences: int, num_drafting: int) -> bool:
    """Whether to look at the exit head at all: sequences that draft together share what it costs the others."""
    share = num_sequences / num_drafting
    even_if_sure = 1.0 - costs.row * num_sequences - costs.lower * share
    return min(even_if_sure, history.exit_gain.value) > costs.exit_head * share


def paying_drafts(expected: Tokens[float], costs: DraftCosts, num_sequences: int) -> dict[int, float]:
    """Choose drafts to run together in one pass of the layers below l; return the passes that each is expected to save.
    `expected`: by draft, the probability that it and those before it are accepted."""
    row = costs.row * num_sequences
    chosen = [at for at, probability in enumerate(expected) if probability > row]
    gain = sum(expected[at] - row for at in chosen) - costs.lower * num_sequences
    return dict.fromkeys(chosen, gain / len(chosen)) if chosen and gain > 0.0 else {}
