"""Weights & Biases as a tracker. If its server cannot be reached at the start, the run is recorded offline; any other
failure logs one warning and ends tracking, never the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import TrackingSpec, WandbSpec
from swiftkv_platform.tracking.tracker import NullTracker, Table, Tracker, TrackingInfo

_KEY = "WANDB_API_KEY"
_RETRIES = 100_000
"""Retries of an upload by wandb's process, at most a minute apart. wandb's own limit is reached after some 20 minutes,
and later data would be dropped silently."""


class WandbTracker:
    """Runs are recorded below `directory/wandb`, whether they are uploaded or not."""

    def __init__(self, spec: WandbSpec, directory: Path, *, name: str, timeout_s: float = 30.0) -> None:
        """`timeout_s`: how long the server may take to answer at the start, and to accept the rest at the end."""
        self._spec = spec
        self._directory = directory
        self._name = name
        self._timeout_s = timeout_s
        self._run: Any = None
        self.info: TrackingInfo | None = None
        self.files: Path | None = None
        self.uploaded = False

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        with self._guarded("start"):
            _keep_files_below(self._directory)
            fault: str | None = None
            if _mode(self._spec) == "online":
                try:
                    self._begin("online", run_id, config)
                except Exception as error:  # W&B raises its own errors, and those of sockets and protobuf
                    fault = _described(error)
                    get_logger().warning("tracking_offline", error=fault)
                    _end_service()
            if self._run is None:
                self._begin("offline", run_id, config, fault)

    def _begin(
        self, mode: Literal["online", "offline"], run_id: str, config: Mapping[str, Any], fault: str | None = None
    ) -> None:
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
                finish_timeout_raises=mode == "online",
                x_file_stream_retry_max=_RETRIES,
                x_graphql_retry_max=_RETRIES,
            ),
        )
        self.files = Path(self._run.settings.sync_dir)
        url = self._run.url if mode == "online" else None
        self.info = TrackingInfo(provider="wandb", run_id=run_id, mode=mode, url=url, fault=fault)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._run is not None:
            with self._guarded("log"):
                self._run.log(dict(metrics), step=step)

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        if self._run is not None:
            with self._guarded("log_report"):
                import wandb
                from PIL import Image

                media: dict[str, Any] = {
                    name: wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
                    for name, table in tables.items()
                }
                media |= {name: wandb.Image(Image.open(BytesIO(png))) for name, png in images.items()}
                if media:
                    self._run.log(media, step=step)
                self._run.summary.update(dict(summary))

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        if self._run is not None:
            with self._guarded("log_artifact"):
                import wandb

                self._run.summary.update({"artifact": {"uri": uri, "sha256": digest}})
                address = uri if "://" in uri else Path(uri).absolute().as_uri()
                artifact = wandb.Artifact(name, type="model", metadata={"uri": uri, "sha256": digest})
                artifact.add_reference(address, checksum=False)  # W&B neither reads nor copies the weights
                self._run.log_artifact(artifact)

    def finish(self) -> None:
        if self._run is not None:
            with self._guarded("finish"):
                try:
                    self._run.finish()
                except TimeoutError:  # everything is in the files
                    get_logger().warning("tracking_not_uploaded", waited_s=self._timeout_s)
                else:
                    self.uploaded = self.info is not None and self.info.mode == "online"

    @contextmanager
    def _guarded(self, action: str) -> Iterator[None]:
        """End tracking at the first failure of any type: W&B raises its own errors, and those of sockets and
        protobuf."""
        try:
            yield
        except Exception as error:
            self._run = self.info = None
            get_logger().warning("tracking_disabled", action=action, error=_described(error))


def _mode(spec: WandbSpec) -> Literal["online", "offline"]:
    """Resolve `auto`: online if a key is set."""
    if spec.mode == "auto":
        return "online" if os.environ.get(_KEY) else "offline"
    return "online" if spec.mode == "online" else "offline"


def _end_service() -> None:
    """End wandb's process, which holds the id of a run that could not be begun."""
    import wandb

    wandb.teardown()


def _keep_files_below(directory: Path) -> None:
    """Put W&B's logs, settings and caches below the run's directory too, unless the environment sets their place."""
    directory.mkdir(parents=True, exist_ok=True)
    for variable, name in (("WANDB_CACHE_DIR", "cache"), ("WANDB_CONFIG_DIR", "config"), ("WANDB_DATA_DIR", "data")):
        os.environ.setdefault(variable, str(directory / "wandb" / name))


def _described(error: Exception) -> str:
    """The error without the key."""
    text, key = f"{type(error).__name__}: {error}", os.environ.get(_KEY)
    return text.replace(key, "***") if key else text


def create_tracker(spec: TrackingSpec, directory: Path, *, name: str) -> Tracker:
    """The tracker that `spec` asks for, its files below `directory`; `name` is the run's display name."""
    if spec.wandb.mode == "disabled":
        return NullTracker()
    from swiftkv_platform.tracking.wandb_tracker import WandbTracker

    return WandbTracker(spec.wandb, directory, name=name)
