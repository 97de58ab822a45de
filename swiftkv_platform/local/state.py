"""State of a stack between commands: addresses and processes, stored in `{home}/run`. Starts and contacts nothing."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from swiftkv_platform.local.processes import ProcessRef

PartName = Literal["ray", "control-plane"]
PARTS: tuple[PartName, ...] = ("ray", "control-plane")


class StackState(BaseModel):
    """Addresses, resources and processes that `up` has chosen and started."""

    model_config = ConfigDict(frozen=True)

    url: str
    """Address of the control plane."""
    serve_url: str
    ray_dashboard_url: str
    ray_port: int
    ray_agent_port: int
    ray_temp_dir: Path
    num_cpus: int
    object_store_memory: int
    """Bytes."""
    operator_files: dict[str, Path] = {}
    """Files that the control plane was started with, such as those of API keys, by setting."""
    parts: dict[PartName, ProcessRef] = {}

    def alive(self, name: PartName) -> bool:
        return name in self.parts and self.parts[name].alive


@dataclass(frozen=True)
class PartStatus:
    """One row of `swiftkv status`."""

    name: str
    state: Literal["running", "not ready", "idle", "stopped"]
    address: str = ""
    pid: int | None = None
    detail: str = ""


class RunDirectory:
    """`{home}/run`: `state.json`, one pid file per part, Ray's token and a lock."""

    def __init__(self, home: Path) -> None:
        self.path = home / "run"
        self.token_file = self.path / "ray-token"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of `up` and `down`, waiting for a command that holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def load(self) -> StackState | None:
        """Load the state; None if nothing was started, or if another version wrote an incompatible state."""
        try:
            return StackState.model_validate_json((self.path / "state.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None

    def save(self, state: StackState) -> None:
        partial = self.path / "state.json.part"
        partial.write_text(state.model_dump_json(indent=2), encoding="utf-8")
        partial.replace(self.path / "state.json")
        for name, part in state.parts.items():
            (self.path / f"{name}.pid").write_text(f"{part.pid}\n", encoding="ascii")

    def clear(self) -> None:
        (self.path / "state.json").unlink(missing_ok=True)
        for name in PARTS:
            (self.path / f"{name}.pid").unlink(missing_ok=True)


def port_of(url: str) -> int:
    """Return the port in a URL; 0 if it names none."""
    return urlsplit(url).port or 0
