"""Files that an attempt enters on its way to an optimizer step, compared with the table in docs/architecture.md."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swiftkv_platform.jobs import distill, driver, ray_train, tasks
from swiftkv_platform.jobs.worker import train
from swiftkv_platform.storage.attempt_store import AttemptStore
from tests.numerics.distillation_worker import group_of_one
from tests.unit.jobs.attempts import Job, request

ROOT = Path(__file__).parents[3]
ROOMS = (ROOT / "jobs", ROOT / "swiftkv_platform/distillation")
MOST = 14


@cache
def listable(name: str) -> str | None:
    """Path of a file as the page lists it; None for a file outside of `ROOMS`."""
    path = Path(name).resolve()
    return str(path.relative_to(ROOT)) if any(path.is_relative_to(room) for room in ROOMS) else None


class Arrived(BaseException):
    """Raised at the first optimizer step."""


class Trail:
    """The files of `ROOMS` whose functions any thread enters, in the order of first entry."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the files it enters are not recorded."""

        def run(*arguments: Any, **options: Any) -> Any:
            sys.setprofile(None)
            try:
                return function(*arguments, **options)
            finally:
                sys.setprofile(self._enter)

        return run

    def _enter(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and (file := listable(frame.f_code.co_filename)):
            self.files.setdefault(file)


class Task:
    """A Ray task that runs at once, in this thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function

    def options(self, **_: Any) -> "Task":
        return self


class RayTrain:
    """Ray Train's trainer with one worker, this process."""

    def __init__(self, loop: Callable[[Any], Any], *, train_loop_config: dict[str, Any], **_: Any) -> None:
        self._loop, self._config = loop, train_loop_config

    def fit(self) -> Any:
        return SimpleNamespace(return_value=self._loop(self._config))


def listed() -> list[str]:
    """Files of the page's table, from the entry point of an attempt on."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.partition("## From POST /jobs to an optimizer step")[2].partition("\n## ")[0]
    files = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    return files[files.index("jobs/distill.py") :]


def test_the_page_lists_the_files_from_an_attempt_to_its_first_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, trail = request(spec=job.spec()), Trail()
    AttemptStore(job.store).write_request(attempt)
    context = SimpleNamespace(get_world_rank=lambda: 0, get_local_rank=lambda: 0)
    for name, stub in {
        "ray.init": lambda: None,
        "ray.remote": Task,
        "ray.get": lambda value: value,
        "ray.wait": lambda done, **_: (done, []),
        "ray.nodes": lambda: [{"Alive": True}],
        "ray.cluster_resources": dict,
        "ray.train.get_context": lambda: context,
        "ray.train.get_preemption_info": lambda: None,
        "ray.train.torch.get_device": lambda: torch.device("cpu"),
    }.items():
        monkeypatch.setattr(name, stub)
    monkeypatch.setattr(ray_train, "_Trainer", RayTrain)
    monkeypatch.setattr(driver, "prepare", trail.apart(tasks.prepare))
    monkeypatch.setattr(train, "find_start", trail.apart(train.find_start))

    def arrive(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer.param_groups[0]["lr"] > 0:  # else torch makes the optimizer's state in a step without an update
            sys.setprofile(None)
            raise Arrived

    hook = register_optimizer_step_pre_hook(arrive)
    try:
        with group_of_one(job.directory), pytest.raises(Arrived), trail.traced():
            distill.main(["--job-id", attempt.job_id, "--attempt", "1", "--store", job.store.uri])
    finally:
        hook.remove()
    assert list(trail.files) == listed()
    assert len(trail.files) <= MOST
