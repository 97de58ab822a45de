"""Surroundings of Ray Train's run on the driver, without a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from swiftkv_platform.jobs.ray_train import _Trainer


@pytest.fixture
def driver() -> Iterator[None]:
    """A main thread that SIGINT interrupts, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Method:
    """Method of an actor; it runs when its result is asked for."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def remote(self) -> Callable[[], Any]:
        return self._function


def _fit(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> Any:
    """`fit` of Ray Train with a controller that does `run`, in this process."""

    def abort() -> None:
        raise ray.exceptions.RayActorError

    result = SimpleNamespace(error=None)
    controller = SimpleNamespace(run=_Method(run), get_result=_Method(lambda: result), abort=_Method(abort))
    as_actor = SimpleNamespace(remote=lambda **_: controller)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _class: as_actor)
    monkeypatch.setattr(ray, "get", lambda function: function())
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    trainer = _Trainer(lambda: None)
    return trainer._initialize_and_run_controller()


def test_ctrl_c_interrupts_training(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        _fit(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGINT))


def test_ctrl_c_means_after_training_what_it_meant_before(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fit(monkeypatch, lambda: None).error is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_process_is_started_for_data_sets_that_there_are_not() -> None:
    """Ray Train starts an actor for Ray Data with every group of workers."""
    callbacks = [type(callback).__name__ for callback in _Trainer(lambda: None)._create_default_callbacks()]
    assert "BackendSetupCallback" in callbacks
    assert "DatasetsCallback" not in callbacks
