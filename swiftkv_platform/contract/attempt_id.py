"""Identity of an attempt, and the keys of its objects. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttemptId:
    """One attempt of a job. `contract.attempts` describes the objects below each key."""

    job_id: str
    number: int
    """Number of the attempt, from 1."""

    @property
    def prefix(self) -> str:
        """Prefix of all objects that the attempt writes."""
        return f"{attempts_prefix(self.job_id)}/{self.number}"

    @property
    def submission_id(self) -> str:
        """Ray's submission id, unique per attempt, so that Ray refuses to submit an attempt twice."""
        return f"{self.job_id}-{self.number}"

    @property
    def request_key(self) -> str:
        return f"{self.prefix}/attempt.json"

    @property
    def preempt_key(self) -> str:
        """Key of an object that exists if the attempt's machines are being taken away."""
        return f"{self.prefix}/control/preempt.json"

    @property
    def pause_key(self) -> str:
        """Key of an object that exists if the attempt is to pause."""
        return f"{self.prefix}/control/pause.json"

    @property
    def events_prefix(self) -> str:
        return f"{self.prefix}/events"

    def event_key(self, writer: str, sequence: int) -> str:
        return f"{self.events_prefix}/{writer}/{sequence:08d}.json"

    @property
    def curve_key(self) -> str:
        """Key of the losses by step, which the evaluation's page draws."""
        return f"{self.prefix}/curve.json"

    @property
    def checkpoints_prefix(self) -> str:
        return f"{self.prefix}/checkpoints"

    @property
    def data_prefix(self) -> str:
        return f"{self.prefix}/data"

    @property
    def answers_prefix(self) -> str:
        return f"{self.prefix}/answers"

    def answers_key(self, key: str) -> str:
        return f"{self.answers_prefix}/{key}.jsonl"

    @property
    def starts_prefix(self) -> str:
        return f"{self.prefix}/starts"

    def start_prefix(self, name: str) -> str:
        """Return the prefix of the calibrated start for the spec `name`: the job's own, or a sweep trial's. Trials
        share one store."""
        return f"{self.starts_prefix}/{name}"

    @property
    def evaluation_prefix(self) -> str:
        return f"{self.prefix}/evaluation"

    def evaluation_key(self, digest: str, part: str) -> str:
        """Return the key of a part of the evaluation of the checkpoint that `digest` names."""
        return f"{self.evaluation_prefix}/{digest}/{part}.json"

    @property
    def artifact_prefix(self) -> str:
        return f"{self.prefix}/artifact"

    @property
    def tracking_prefix(self) -> str:
        return f"{self.prefix}/tracking"

    @property
    def logs_key(self) -> str:
        return f"{self.prefix}/logs.txt"

    def so_far(self) -> tuple[AttemptId, ...]:
        """Return the job's attempts up to and including this one, in order."""
        return tuple(AttemptId(self.job_id, number) for number in range(1, self.number + 1))


def attempts_prefix(job_id: str) -> str:
    """Return the prefix of all attempts of a job; each has its objects below its number."""
    return f"jobs/{job_id}/attempts"


def trials_prefix(job_id: str) -> str:
    """Return the prefix of all trials of a sweep; each has a store below its name, laid out like the job's."""
    return f"jobs/{job_id}/trials"
