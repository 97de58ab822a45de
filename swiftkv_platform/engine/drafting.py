"""Number of tokens to draft, and prompt lookup, which drafts from earlier text. Knows no tensors.

A draft costs a fraction of a pass, and every sequence of the step waits for it. If it is accepted, its sequence gains
one token. So a draft is worthwhile if

    acceptance probability > cost in passes * number of sequences that get a token in the step

For prompt lookup the probability is the sequence's recent acceptance rate. For the exit head it is the head's
calibrated confidence: its odds times a factor learned from earlier drafts. (A head that spreads its probability over
several tokens ranks the right token first more often than its confidence says.) While drafting is not worthwhile,
nothing is observed, and the estimates decay to their priors. So drafting is tried again, at most every few dozen
tokens. The generated text does not depend on any of this."""

from __future__ import annotations

import math
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

MIN_NGRAM, MAX_NGRAM = 2, 4
"""Min and max length of the n-gram at the text's end that is looked up; the longest match is used."""
DECAY, IDLE_DECAY = 0.9, 0.97
"""Factor on older observations per new observation, and per token without a draft."""
MAX_LOG_ODDS_SHIFT = 4.0
"""Max absolute value of the learned shift of the log-odds."""
MAX_CONFIDENCE = 0.95
"""Upper bound of the exit head's confidence before the learned shift is applied."""


@dataclass(frozen=True)
class Draft:
    """Tokens to verify after the last known token, either from the text or from the exit head. Their KV slots are
    allocated."""

    token_ids: tuple[int, ...] = ()
    """Tokens found in the text, which run together with the last known token."""
    num_exit_tokens: int = 0
    """Max number of tokens that the exit head drafts, one after another."""

    @property
    def size(self) -> int:
        return len(self.token_ids) + self.num_exit_tokens

    def truncate(self, size: int) -> Draft:
        return Draft(self.token_ids[:size], min(self.num_exit_tokens, size))


NO_DRAFT = Draft()


@dataclass(frozen=True)
class DraftCosts:
    """Costs in units of a decode pass, which is bound by reading weights."""

    lower_layers: float
    """Cost of layers < l, which run once per draft of the exit head."""
    exit_head: float
    """Cost of computing the exit head's logits."""
    token: float
    """Cost of one more token in a pass."""
    max_step_tokens: int
    """Max tokens of a step with drafts. Larger steps are bound by arithmetic, where each token costs time."""


class RunningRate:
    """Running rate of hits per trial, which decays to its prior while nothing is observed."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = self._trials = 0.0

    @property
    def value(self) -> float:
        return (self._prior + self._hits) / (1.0 + self._trials)

    def record_trials(self, hits: float, trials: float) -> None:
        if trials:
            self._hits, self._trials = self._hits * DECAY + hits, self._trials * DECAY + trials

    def decay(self) -> None:
        self._hits, self._trials = self._hits * IDLE_DECAY, self._trials * IDLE_DECAY


class ConfidenceCalibration:
    """Learned shift of the log-odds of the exit head's confidence: above 0 if it is right more often than it says.

    It is learned draft by draft, by gradient steps on the likelihood of the results.

    Args:
        rate: learning rate.
        decay: factor on the shift with each token without a draft.
        parent: calibration of the whole engine, to which this one is relative and which learns from the same drafts.
    """

    def __init__(self, rate: float, decay: float, parent: ConfidenceCalibration | None = None) -> None:
        self._rate, self._decay, self.parent = rate, decay, parent
        self._own = 0.0

    @property
    def log_odds_shift(self) -> float:
        return self._own + (self.parent.log_odds_shift if self.parent else 0.0)

    def estimate_acceptance(self, confidence: float) -> float:
        """Return the acceptance probability of a draft with this confidence; 0 stays 0."""
        if not confidence > 0.0:
            return 0.0
        odds_against = 1.0 / min(confidence, MAX_CONFIDENCE) - 1.0
        return 1.0 / (1.0 + odds_against * math.exp(-self.log_odds_shift))  # sigmoid(logit(confidence) + shift)

    def learn_from_draft(self, confidence: float, *, accepted: bool) -> None:
        expected = self.estimate_acceptance(confidence)
        self._apply_step((accepted - expected) / (expected * (1.0 - expected) + 0.25))

    def decay(self) -> None:
        self._own *= self._decay
        if self.parent:
            self.parent.decay()

    def _apply_step(self, step: float) -> None:
        self._own = max(-MAX_LOG_ODDS_SHIFT, min(MAX_LOG_ODDS_SHIFT, self._own + self._rate * step))
        if self.parent:
            self.parent._apply_step(step)


class PromptLookup:
    """Index of the last occurrence of each n-gram in a growing text."""

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after it
        self._num_indexed = 0

    def propose_tokens(self, token_ids: Tokens[int], size: int) -> tuple[int, ...]:
        """Return the `size` tokens that followed the last earlier occurrence of the text's final n-gram, the longest
        that occurred before. If fewer tokens followed, they repeat. Empty without an earlier occurrence."""
        # 1. index the n-grams that end before each new token
        for at in range(self._num_indexed, len(token_ids)):
            for length in range(MIN_NGRAM, min(MAX_NGRAM, at) + 1):
                self._followers[tuple(token_ids[at - length : at])] = at
        self._num_indexed = len(token_ids)
        # 2. look up the longest n-gram at the end, and copy the tokens after its earlier occurrence
        for length in range(min(MAX_NGRAM, len(token_ids)), MIN_NGRAM - 1, -1):
            start = self._followers.get(tuple(token_ids[-length:]))
            if start is not None:
                proposed = list(token_ids[start : start + size])
                period = len(token_ids) - start
                while len(proposed) < size:
                    proposed.append(proposed[len(proposed) - period])
                return tuple(proposed)
        return ()


class AcceptanceHistory:
    """Results of a sequence's drafts."""

    def __init__(self) -> None:
        self.lookup = PromptLookup()
        self.lookup_acceptance = RunningRate(0.7)
        self.exit_calibration = ConfidenceCalibration(0.4, 0.99)
        self.exit_gain = RunningRate(0.2)
        """Decode passes that an evaluation of the exit head saves, not counting its cost."""
        self.exit_confidences: list[float] = []
        """Confidences of the current step's drafts."""

    def use_parent_calibration(self, parent: ConfidenceCalibration) -> None:
        """Use `parent`, the calibration of the engine's exit head, as the baseline."""
        if self.exit_calibration.parent is not parent:
            self.exit_calibration = ConfidenceCalibration(0.4, 0.99, parent)

    def record_draft_results(self, *, from_text: bool, num_drafts: int, num_accepted: int) -> None:
        num_tried = min(num_accepted + 1, num_drafts)
        if from_text:
            self.lookup_acceptance.record_trials(num_accepted, num_tried)
        else:
            for at, confidence in enumerate(self.exit_confidences[:num_tried]):
                self.exit_calibration.learn_from_draft(confidence, accepted=at < num_accepted)

    def record_exit_head_gain(self, gain: float) -> None:
        """Record an evaluation of the exit head, whose draft should save `gain` passes; 0: it drafted nothing."""
        self.exit_gain.record_trials(gain, 1.0)
        if not gain:
            self.exit_calibration.decay()

    def decay_exit_statistics(self) -> None:
        """Record a token without an evaluation of the exit head."""
        self.exit_calibration.decay()
        self.exit_gain.decay()


def choose_num_lookup_tokens(history: AcceptanceHistory, costs: DraftCosts, num_sequences: int, limit: int) -> int:
    """Return how many tokens of a prompt lookup to draft. The n-th is accepted with probability (acceptance rate)^n."""
    accepted, probability, size = history.lookup_acceptance.value, 1.0, 0
    while size < limit and (probability := probability * accepted) > costs.token * num_sequences:
        size += 1
    return size


def should_evaluate_exit_head(
    history: AcceptanceHistory, costs: DraftCosts, num_sequences: int, num_drafting: int
) -> bool:
    """Whether evaluating the exit head is worthwhile. Sequences that draft in the same step share the cost."""
    sequences_per_draft = num_sequences / num_drafting
    # if the draft is surely accepted
    max_gain = 1.0 - costs.token * num_sequences - costs.lower_layers * sequences_per_draft
    return min(max_gain, history.exit_gain.value) > costs.exit_head * sequences_per_draft


def choose_worthwhile_drafts(expected: Tokens[float], costs: DraftCosts, num_sequences: int) -> dict[int, float]:
    """Choose the drafts to run in one pass of layers < l. Returns the expected number of passes saved per chosen draft.
    `expected`: for each draft, the probability that it and all drafts before it are accepted."""
    row = costs.token * num_sequences
    chosen = [at for at, probability in enumerate(expected) if probability > row]
    gain = sum(expected[at] - row for at in chosen) - costs.lower_layers * num_sequences
    return dict.fromkeys(chosen, gain / len(chosen)) if chosen and gain > 0.0 else {}
