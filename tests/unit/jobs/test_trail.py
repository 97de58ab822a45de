"""Files that an attempt enters on its way to an optimizer step, compared with the table in docs/architecture.md."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swiftkv_platform.jobs import distill, driver, ray_train, tasks
from swiftkv_platform.jobs.worker import train
from swiftkv_platform.storage.attempt_store import AttemptStore
from tests.numerics.distillation_worker import group_of_one
from tests.trails import Entered, section, tables, traced
from tests.unit.jobs.attempts import Job, request

ROOMS = ("jobs/", "swiftkv_platform/distillation/")
MOST = 14


class Arrived(BaseException):
    """Raised at the first optimizer step."""


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


def test_the_page_lists_the_files_from_an_attempt_to_its_first_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, trail = request(spec=job.spec()), Entered()
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
            trail.recording = False
            raise Arrived

    hook = register_optimizer_step_pre_hook(arrive)
    trail.recording = True
    try:
        with group_of_one(job.directory), pytest.raises(Arrived), traced(trail):
            distill.main(["--job-id", attempt.job_id, "--attempt", "1", "--store", job.store.uri])
    finally:
        hook.remove()
    entered = [file for file in trail.files if file.startswith(ROOMS)]
    [listed] = tables(section("From POST /jobs to an optimizer step"))
    assert entered == listed[listed.index("jobs/distill.py") :]
    assert len(entered) <= MOST
