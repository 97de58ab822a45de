"""Threshold early exit in one `generate()` call: which rows of a step exit, and how many tokens did so.

Source: paper, appendix E.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteriaList

from swiftkv_platform.model.selection import TokenSelection


def exit_confidence(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest probability of each row of the exit head's logits [..., vocab_size], at temperature 1 and
    before any logits processor; a row exits if it reaches the threshold."""
    return logits.float().softmax(-1).amax(-1)


class ThresholdExits:
    """Decides in each step which rows exit, and counts their tokens. A step is one `decide`, then one `finish`."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.num_exited_tokens: torch.Tensor | None = None
        """Exited tokens by row, int64 [batch]; tokens after a row's end do not count."""
        self._exited: torch.Tensor | None = None
        self._running: torch.Tensor | None = None

    def decide(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the mask of rows that exit, bool [batch], given the exit head's logits [batch, vocab_size]."""
        self._exited = exit_confidence(logits) >= self.threshold
        return self._exited

    def finish(self, done: torch.Tensor) -> None:
        """Count the step's exited tokens. `done`: rows that have ended with this step, bool [batch]."""
        assert self._exited is not None, "a step ends before it was decided"
        if self.num_exited_tokens is None or self._running is None:
            self.num_exited_tokens = torch.zeros_like(done, dtype=torch.long)
            self._running = torch.ones_like(done)
        self.num_exited_tokens += self._exited.to(done.device) & self._running
        self._running &= ~done

    def watch(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """Wrap stopping criteria so that they also report finished rows to this object."""
        return _WatchedCriteria(self, criteria)


class ExitStep:
    """One forward pass with exits: selects from x the rows that go on, then merges both kinds of logits."""

    def __init__(self, exits: ThresholdExits, exit_logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._exits = exits
        self._exit_logits = exit_logits
        self._logits: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None

    def choose(self, x: torch.Tensor) -> TokenSelection:
        """Select the last token of the rows that do not exit. `x` [batch, num_tokens, hidden_size]: layer l's input."""
        self._logits = self._exit_logits(x[:, -1:])  # [batch, 1, vocab_size]
        exited = self._exits.decide(self._logits[:, 0])
        self._rows = (~exited).nonzero().squeeze(1) if bool(exited.any()) else None
        return TokenSelection(1, rows=self._rows)

    def merge(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all rows [batch, 1, vocab_size], given those of rows that went on [num_rows, 1,
        vocab_size]."""
        assert self._logits is not None, "merged before a row was chosen"
        return logits if self._rows is None else self._logits.index_copy(0, self._rows, logits)


class _WatchedCriteria(StoppingCriteriaList):
    def __init__(self, exits: ThresholdExits, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self._exits = exits

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        done: torch.Tensor = super().__call__(*args, **kwargs)
        self._exits.finish(done)
        return done
