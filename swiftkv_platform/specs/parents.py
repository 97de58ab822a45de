"""Names of what a job continues from: a model, or a checkpoint of a job. Looks nothing up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

_NAME = re.compile(
    r"(?P<model>mdl_[0-9A-Za-z]+)"
    r"|(?P<job>job_[0-9A-Za-z]+):(?:(?P<step>\d{1,12})|ckpt_(?P<named>\d{8,12})_(?P<attempt>\d{4,8}))"
)


@dataclass(frozen=True)
class ParentName:
    """A model's id, or a checkpoint's job and step."""

    model: str | None = None
    job: str | None = None
    step: int | None = None
    attempt: int | None = None
    """Attempt that made the checkpoint; None for the newest one that reached the step."""

    @classmethod
    def parse(cls, text: str) -> ParentName:
        """Raises `ValueError` for what has the form of neither."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text[:80]!r} names neither a model nor a checkpoint; a model's id (mdl_...), JOB:STEP "
                "(job_...:100) or a checkpoint as OpenAI's API lists it (job_...:ckpt_00000100_0001) is accepted"
            )
        if match["model"] is not None:
            return cls(model=match["model"])
        step = int(match["step"] or match["named"])
        return cls(job=match["job"], step=step, attempt=None if match["attempt"] is None else int(match["attempt"]))

    def __str__(self) -> str:
        if self.model is not None:
            return self.model
        return f"{self.job}:{self.step}" if self.attempt is None else f"{self.job}:{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """Id of the checkpoint among those of its job."""
        return f"ckpt_{self.step:08d}_{self.attempt:04d}"


def _checked(text: str) -> str:
    return str(ParentName.parse(text))


ParentReference = Annotated[str, Field(max_length=200), AfterValidator(_checked)]
"""`mdl_...`, `job_...:STEP` or `job_...:ckpt_...`."""
