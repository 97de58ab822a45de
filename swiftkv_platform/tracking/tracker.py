"""Tracking of a run by Weights & Biases, behind a queue. No method of a tracker ever fails a run.

If W&B cannot be reached at the start, the run is recorded offline; any other failure ends tracking with a warning.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Literal

from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import WandbSpec


@dataclass(frozen=True)
class TrackingInfo:
    """Location of the run at the tracker; the `data` of an attempt's `tracking` event."""

    provider: Literal["wandb"]
    run_id: str
    mode: Literal["online", "offline"]
    url: str | None
    """Page of the run; None offline."""
    fault: str | None = None
    """Reason why data is missing at the tracker."""


@dataclass(frozen=True)
class Table:
    """Table of results to sort and compare in the tracker."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


_KEY = "WANDB_API_KEY"
_RETRIES = 100_000
"""Retries of an upload by wandb's process, at most a minute apart. wandb's own limit is reached after some 20 minutes,
and later data would be dropped silently."""


class WandbTracker:
    """One run: `start`, any number of records, `finish`, from one thread. Records nothing if the mode is `disabled`.

    Args:
        directory: runs are recorded below `directory/wandb`, whether they are uploaded or not.
        name: the run's display name.
        timeout_s: how long the server may take to answer at the start, and to accept the rest at the end.
    """

    def __init__(self, spec: WandbSpec, directory: Path, *, name: str, timeout_s: float = 30.0) -> None:
        self._spec = spec
        self._directory = directory
        self._name = name
        self._timeout_s = timeout_s
        self._run: Any = None
        self.info: TrackingInfo | None = None
        """Location of the run; None before `start`, and if nothing is being recorded."""
        self.files: Path | None = None
        """Directory where the run is recorded, also after `finish`; None if there is none."""
        self.uploaded = False
        """Whether W&B has taken everything, so that `files` need not be kept; False before `finish`."""

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Start the run or resume it: every attempt of a job has the same `run_id`."""
        if self._spec.mode == "disabled":
            return
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
        """Record metrics of an optimizer step."""
        if self._run is not None:
            with self._guarded("log"):
                self._run.log(dict(metrics), step=step)

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        """Record final figures, tables and PNG images, at a step after the last trained one."""
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
        """Record the location of the model; nothing is copied."""
        if self._run is not None:
            with self._guarded("log_artifact"):
                import wandb

                self._run.summary.update({"artifact": {"uri": uri, "sha256": digest}})
                address = uri if "://" in uri else Path(uri).absolute().as_uri()
                artifact = wandb.Artifact(name, type="model", metadata={"uri": uri, "sha256": digest})
                artifact.add_reference(address, checksum=False)  # W&B neither reads nor copies the weights
                self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Send everything that is left."""
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


_MOST_WAITING = 10_000
_TELL_AGAIN_S = 5.0


class BackgroundTracker:
    """Makes the calls of a tracker in order, on its own thread.

    Args:
        on_info: called on that thread with the run's location, once it is known; retried every few seconds while it
            returns False.
        most_waiting: size of the queue. Further calls are dropped, and counted in one warning.
        finish_s: seconds that `finish` waits for earlier calls.
    """

    def __init__(
        self,
        tracker: WandbTracker,
        *,
        on_info: Callable[[TrackingInfo], bool] = lambda _: True,
        most_waiting: int = _MOST_WAITING,
        finish_s: float = 90.0,
    ) -> None:
        self._tracker = tracker
        self._on_info = on_info
        self._finish_s = finish_s
        self._calls: Queue[Callable[[], None] | None] = Queue(most_waiting)
        self._dropped = 0
        self._told = False
        self._tell_at = 0.0
        self._thread = threading.Thread(target=copy_context().run, args=(self._work,), name="tracking", daemon=True)
        self._thread.start()

    @property
    def info(self) -> TrackingInfo | None:
        return self._tracker.info

    @property
    def files(self) -> Path | None:
        return self._tracker.files

    @property
    def uploaded(self) -> bool:
        return self._tracker.uploaded

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        self._put(partial(self._tracker.start, run_id, config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._put(partial(self._tracker.log, dict(metrics), step))

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        self._put(partial(self._tracker.log_report, summary, tables, images, step))

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        self._put(partial(self._tracker.log_artifact, name, uri, digest))

    def finish(self) -> None:
        """Wait until all calls are made, at most `finish_s` seconds. The thread ends with its process."""
        deadline = time.monotonic() + self._finish_s
        try:
            self._calls.put(self._tracker.finish, timeout=self._finish_s)
            self._calls.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except Full:
            pass  # logged below
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            get_logger().warning("tracking_unfinished", waited_s=self._finish_s, num_calls=self._calls.qsize())
        if self._dropped:
            get_logger().warning("tracking_dropped", num_calls=self._dropped)

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._dropped += 1

    def _work(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=None if self._told or self.info is None else _TELL_AGAIN_S)
            except Empty:
                self._tell()
                continue
            if call is None:
                return
            try:
                call()
            except Exception:  # no failure of tracking may end the thread, which `finish` waits for
                get_logger().exception("tracking_failed")
            self._tell()

    def _tell(self) -> None:
        info = self.info
        if self._told or info is None or time.monotonic() < self._tell_at:
            return
        self._told = self._on_info(info)
        self._tell_at = time.monotonic() + _TELL_AGAIN_S
