"""Who runs next: first come, first served, one sequence at a time. Knows no tensor and no model."""

from __future__ import annotations

from collections import deque

from swiftkv_platform.engine.sequence import Sequence, SequenceStatus

MAX_NUM_SEQS = 1
"""Sequences that run at the same time."""


class Scheduler:
    """The queue of waiting sequences and the one that runs."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a waiting sequence."""
        self._waiting.append(sequence)

    def schedule(self) -> list[Sequence]:
        """The sequences of the next step; empty when there is nothing to do."""
        while len(self._running) < MAX_NUM_SEQS and self._waiting:
            sequence = self._waiting.popleft()
            sequence.start()
            self._running.append(sequence)
        return list(self._running)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished sequence."""
        assert sequence.status is SequenceStatus.FINISHED
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)
