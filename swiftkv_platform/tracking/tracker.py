"""Tracking of a run with Weights & Biases, behind a queue. Tracking errors never fail a run.

If W&B is unavailable at the start, the run is recorded offline. Any other error ends tracking with a warning.
"""

from __future__ import annotations

import netrc
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
from urllib.parse import urlsplit

from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import WandbSpec
from swiftkv_platform.specs.job import restrict_wandb_mode

_API_KEY_VARIABLE = "WANDB_API_KEY"


def get_wandb_server() -> str:
    """Return the URL of the W&B server, without a slash at the end."""
    return (os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")


def find_api_key() -> str | None:
    """Return the key for the W&B server: the value of `WANDB_API_KEY`, else the password of the server's own entry in
    `$NETRC` or `~/.netrc`; None without one. A default entry, which is for other servers, does not count."""
    if key := os.environ.get(_API_KEY_VARIABLE):
        return key
    file = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")  # noqa: PTH111  # which raises without a home
    try:
        _, _, password = netrc.netrc(file).hosts.get(urlsplit(get_wandb_server()).netloc, ("", "", ""))
    except FileNotFoundError:
        return None
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
        get_logger().warning("netrc_unreadable", path=file, error=type(error).__name__)  # its text may quote a password
        return None
    return password or None


@dataclass(frozen=True)
class TrackingInfo:
    """Location of the run at the tracker: the `data` of a `tracking` event."""

    provider: Literal["wandb"]
    run_id: str
    mode: Literal["online", "offline"]
    url: str | None
    """URL of the run; None offline."""
    fault: str | None = None
    """Reason why the tracker lacks data."""


@dataclass(frozen=True)
class Table:
    """Table of results."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


_MAX_UPLOAD_RETRIES = 100_000
"""Retries of an upload by wandb's process, at most a minute apart. With wandb's default, data would be dropped silently
after about 20 minutes."""


class WandbTracker:
    """Tracks one run: `start`, any number of records, `finish`, from one thread. Mode `disabled` records nothing.

    Args:
        directory: runs are recorded below `directory/wandb`, online and offline.
        name: display name of the run.
        timeout_s: timeout of the server's response at the start, and of the final upload.
    """

    def __init__(self, spec: WandbSpec, directory: Path, *, name: str, timeout_s: float = 30.0) -> None:
        self._spec = spec
        self._directory = directory
        self._name = name
        self._timeout_s = timeout_s
        self._run: Any = None
        self.info: TrackingInfo | None = None
        """Location of the run; None before `start`, and while nothing is recorded."""
        self.files: Path | None = None
        """Directory of the recorded run, also after `finish`; None if nothing was recorded."""
        self.uploaded = False
        """Whether W&B has all data, so that `files` can be deleted; False before `finish`."""

    def start(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Start or resume the run: all attempts of a job have the same `run_id`."""
        mode = restrict_wandb_mode(self._spec.mode, os.environ)
        if mode == "disabled":
            return
        with self._disable_on_failure("start"):
            _set_wandb_directories(self._directory)
            fault: str | None = None
            if mode == "online" or (mode == "auto" and find_api_key()):
                try:
                    self._init_run("online", run_id, config)
                except Exception as error:  # W&B raises its own errors, and errors of sockets and protobuf
                    fault = _describe_error(error)
                    get_logger().warning("tracking_offline", error=fault)
                    _stop_wandb_process()
            if self._run is None:
                self._init_run("offline", run_id, config, fault)

    def _init_run(
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
                x_file_stream_retry_max=_MAX_UPLOAD_RETRIES,
                x_graphql_retry_max=_MAX_UPLOAD_RETRIES,
            ),
        )
        self.files = Path(self._run.settings.sync_dir)
        url = self._run.url if mode == "online" else None
        self.info = TrackingInfo(provider="wandb", run_id=run_id, mode=mode, url=url, fault=fault)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of an optimizer step."""
        if self._run is not None:
            with self._disable_on_failure("log"):
                self._run.log(dict(metrics), step=step)

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        """Record final figures, tables and PNG images, at a step after the last training step."""
        if self._run is not None:
            with self._disable_on_failure("log_report"):
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
        """Record the location of the model without copying it."""
        if self._run is not None:
            with self._disable_on_failure("log_artifact"):
                import wandb

                self._run.summary.update({"artifact": {"uri": uri, "sha256": digest}})
                address = uri if "://" in uri else Path(uri).absolute().as_uri()
                artifact = wandb.Artifact(name, type="model", metadata={"uri": uri, "sha256": digest})
                artifact.add_reference(address, checksum=False)  # W&B neither reads nor copies the weights
                self._run.log_artifact(artifact)

    def finish(self) -> None:
        """Upload the remaining data and end the run."""
        if self._run is not None:
            with self._disable_on_failure("finish"):
                try:
                    self._run.finish()
                except TimeoutError:  # the files have all data
                    get_logger().warning("tracking_not_uploaded", waited_s=self._timeout_s)
                else:
                    self.uploaded = self.info is not None and self.info.mode == "online"

    @contextmanager
    def _disable_on_failure(self, action: str) -> Iterator[None]:
        """End tracking at the first error of any type: W&B raises its own errors, and errors of sockets and
        protobuf."""
        try:
            yield
        except Exception as error:
            self._run = self.info = None
            get_logger().warning("tracking_disabled", action=action, error=_describe_error(error))


def _stop_wandb_process() -> None:
    """End wandb's process, which blocks the id of a run that failed to start."""
    import wandb

    wandb.teardown()


def _set_wandb_directories(directory: Path) -> None:
    """Set W&B's directories for caches, settings and data below the run's directory, unless the environment does."""
    directory.mkdir(parents=True, exist_ok=True)
    for variable, name in (("WANDB_CACHE_DIR", "cache"), ("WANDB_CONFIG_DIR", "config"), ("WANDB_DATA_DIR", "data")):
        os.environ.setdefault(variable, str(directory / "wandb" / name))


def _describe_error(error: Exception) -> str:
    """Return the error's text without the API key."""
    text, key = f"{type(error).__name__}: {error}", find_api_key()
    return text.replace(key, "***") if key else text


_MAX_QUEUED_CALLS = 10_000
_INFO_RETRY_INTERVAL_S = 5.0


class BackgroundTracker:
    """Makes the calls of a tracker in order, on its own thread.

    Args:
        on_info: called on that thread with the run's location, once it is known; retried every few seconds while it
            returns False.
        max_queued_calls: size of the queue. Further calls are dropped, and counted in one warning.
        finish_timeout_s: seconds that `finish` waits for earlier calls.
    """

    def __init__(
        self,
        tracker: WandbTracker,
        *,
        on_info: Callable[[TrackingInfo], bool] = lambda _: True,
        max_queued_calls: int = _MAX_QUEUED_CALLS,
        finish_timeout_s: float = 90.0,
    ) -> None:
        self._tracker = tracker
        self._on_info = on_info
        self._finish_timeout_s = finish_timeout_s
        self._calls: Queue[Callable[[], None] | None] = Queue(max_queued_calls)
        self._dropped = 0
        self._is_info_reported = False
        self._next_report_time = 0.0
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._run_calls,), name="tracking", daemon=True
        )
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
        self._enqueue(partial(self._tracker.start, run_id, config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._enqueue(partial(self._tracker.log, dict(metrics), step))

    def log_report(
        self, summary: Mapping[str, Any], tables: Mapping[str, Table], images: Mapping[str, bytes], step: int
    ) -> None:
        self._enqueue(partial(self._tracker.log_report, summary, tables, images, step))

    def log_artifact(self, name: str, uri: str, digest: str) -> None:
        self._enqueue(partial(self._tracker.log_artifact, name, uri, digest))

    def finish(self) -> None:
        """Wait for the queued calls, at most `finish_timeout_s` seconds. The thread ends with the process."""
        deadline = time.monotonic() + self._finish_timeout_s
        try:
            self._calls.put(self._tracker.finish, timeout=self._finish_timeout_s)
            self._calls.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except Full:
            pass  # logged below
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            get_logger().warning("tracking_unfinished", waited_s=self._finish_timeout_s, num_calls=self._calls.qsize())
        if self._dropped:
            get_logger().warning("tracking_dropped", num_calls=self._dropped)

    def _enqueue(self, call: Callable[[], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except Full:
            self._dropped += 1

    def _run_calls(self) -> None:
        while True:
            try:
                call = self._calls.get(
                    timeout=None if self._is_info_reported or self.info is None else _INFO_RETRY_INTERVAL_S
                )
            except Empty:
                self._report_info()
                continue
            if call is None:
                return
            try:
                call()
            except Exception:  # no error may end the thread, for which `finish` waits
                get_logger().exception("tracking_failed")
            self._report_info()

    def _report_info(self) -> None:
        info = self.info
        if self._is_info_reported or info is None or time.monotonic() < self._next_report_time:
            return
        self._is_info_reported = self._on_info(info)
        self._next_report_time = time.monotonic() + _INFO_RETRY_INTERVAL_S
