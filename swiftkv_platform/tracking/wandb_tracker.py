"""Weights & Biases as a tracker. Its failures become one warning and end the tracking, never the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import WandbSpec
from swiftkv_platform.tracking.tracker import TrackingInfo

_KEY = "WANDB_API_KEY"


class WandbTracker:
    """Offline runs stay below `directory/wandb`; `wandb sync` uploads them later and merges those of one run id."""

    def __init__(self, spec: WandbSpec, directory: Path, *, name: str, timeout_s: float = 60.0) -> None:
        """`timeout_s`: how long a server may take to answer at the start, and to take the rest at the end."""
        self._spec = spec
        self._directory = directory
        self._name = name
        self._timeout_s = timeout_s
        self._run: Any = None
        self._info: TrackingInfo | None = None

    @property
    def info(self) -> TrackingInfo | None:
        return self._info

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        mode = _mode(self._spec)
        with self._guarded("start"):
            _keep_files_below(self._directory)
            import wandb

            self._run = wandb.init(
                project=self._spec.project,
                entity=self._spec.entity,
                tags=list(self._spec.tags),
                name=self._name,
                id=run_id,
                resume="allow",
                dir=str(self._directory),
                mode=mode,
                config=dict(config),
                reinit="create_new",
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    disable_code=True,
                    disable_git=True,
                    init_timeout=self._timeout_s,
                    finish_timeout=self._timeout_s,
                ),
            )
            url = self._run.url if mode == "online" else None
            self._info = TrackingInfo(provider="wandb", run_id=run_id, mode=mode, url=url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._run is not None:
            with self._guarded("log"):
                self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self._run is not None:
            with self._guarded("finish"):
                self._run.summary.update(dict(summary))
                self._run.finish()

    @contextmanager
    def _guarded(self, action: str) -> Iterator[None]:
        """Tracking ends at the first failure of any type: W&B raises its own, those of sockets, of protobuf."""
        try:
            yield
        except Exception as error:
            self._run = self._info = None
            get_logger().warning(
                "tracking_disabled", action=action, error=_without_key(f"{type(error).__name__}: {error}")
            )


def _mode(spec: WandbSpec) -> Literal["online", "offline"]:
    """`auto` is online where a key is set."""
    if spec.mode == "auto":
        return "online" if os.environ.get(_KEY) else "offline"
    return "online" if spec.mode == "online" else "offline"


def _keep_files_below(directory: Path) -> None:
    """W&B's own logs, settings and caches go to the run's directory too, unless the environment says where."""
    directory.mkdir(parents=True, exist_ok=True)
    for variable, name in (
        ("WANDB_CACHE_DIR", "cache"),
        ("WANDB_CONFIG_DIR", "config"),
        ("WANDB_DATA_DIR", "data"),
    ):
        os.environ.setdefault(variable, str(directory / "wandb" / name))


def _without_key(text: str) -> str:
    key = os.environ.get(_KEY)
    return text.replace(key, "***") if key else text
