"""Setup of a worker in any phase: its process, process group and shared directory, the downloads of teacher and data,
and the student with its calibrated start. Does not use Ray.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.contract.traffic import MAX_WRITE_DELAY_S
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.data.source_rows import RemoteFile
from swiftkv_platform.distillation.calibration_text import iter_calibration_batches
from swiftkv_platform.distillation.model import DistillationModel, compile_layers, load_trained_tensors
from swiftkv_platform.distillation.strategy import Strategy
from swiftkv_platform.distillation.trainer import parallelize
from swiftkv_platform.errors import DataError
from swiftkv_platform.jobs.attempt.stored import StoredInputs
from swiftkv_platform.jobs.values import GroupMember
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model import tokenizers
from swiftkv_platform.model.calibration import calibrate_layerwise
from swiftkv_platform.model.configuration import convert_errors, read_config
from swiftkv_platform.model.conversion import make_student
from swiftkv_platform.model.weights.bases import resolve_model_directory
from swiftkv_platform.model.weights.lazy_student import LazyStudent
from swiftkv_platform.model.weights.writing import ShardWriter
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.planning.config import MODEL_FIELD
from swiftkv_platform.sources import UNRESTRICTED, Access, S3Source
from swiftkv_platform.sources.loader_rules import GENERATION
from swiftkv_platform.sources.names import CapturedTraffic
from swiftkv_platform.specs import JobSpec, ModelSpec, ResourcesSpec
from swiftkv_platform.storage.downloads import list_prefix, make_model_download, open_source_bucket
from swiftkv_platform.storage.object_store import open_store, open_temporary
from swiftkv_platform.storage.traffic import TrafficReader, encode_row

_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
_MIN_MAPPED_BYTES = 8 << 20
"""Minimum bytes of a tensor with its own memory mapping. By default glibc raises this threshold to 32 MiB when a tensor
of that size is freed; gathered layers then stay in its heap, and a worker holds twice the memory it uses."""
_GROUP_TIMEOUT = timedelta(hours=24)
"""Maximum time that a worker waits for another one, e.g. for a download. A lost worker is detected at once."""
_DATA_FIELD = "data.sources"


def set_up_process(spec: JobSpec) -> None:
    """Limit the threads to the cores of this process (processes that share cores are fifty times slower), return unused
    memory, and keep progress bars out of the log."""
    return_freed_memory()
    torch.set_num_threads(max(1, int(spec.resources.cpus_per_worker)))
    set_deterministic_algorithms(spec.training.deterministic)
    transformers.utils.logging.disable_progress_bar()


def set_deterministic_algorithms(enabled: bool) -> None:
    """Make PyTorch use operators with bitwise reproducible results."""
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the process's first product on a GPU
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it takes time


def return_freed_memory() -> None:
    """Make glibc return the memory of a freed large tensor to the system at once. No effect with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES)


def get_free_bytes(device: torch.device, num_local_workers: int) -> float:
    """Return the free bytes on `device` for each of the `num_local_workers` workers on this machine."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available) / num_local_workers


def get_task_device(spec: JobSpec) -> torch.device:
    """Return the device of a task with a worker's resources."""
    return torch.device("cuda" if spec.resources.gpus_per_worker else "cpu")


@contextmanager
def join_process_group(member: GroupMember, resources: ResourcesSpec) -> Iterator[None]:
    """Create the default process group of the workers; none for a single worker."""
    if member.size == 1:
        yield
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if resources.gpus_per_worker else "gloo",
        init_method=f"tcp://{member.address}",
        rank=member.rank,
        world_size=member.size,
        timeout=_GROUP_TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Workspace:
    """Directory shared by the workers of a machine."""

    path: Path
    is_downloader: bool
    """Whether this worker downloads for all workers of its machine."""
    num_local_workers: int
    """Number of workers on the machine."""


@contextmanager
def create_shared_workspace(name: str) -> Iterator[Workspace]:
    """Create a directory for all workers of a machine, and remove it on exit. Collective."""
    workers = Workers()
    hosts, host = workers.gather(socket.gethostname()), socket.gethostname()
    path = Path(tempfile.gettempdir()) / workers.broadcast_from_first(f"{name}-{uuid4().hex}")
    path.mkdir(mode=0o700, exist_ok=True)
    is_downloader = workers.rank == hosts.index(host)
    try:
        yield Workspace(path, is_downloader, hosts.count(host))
    finally:
        if is_downloader:
            shutil.rmtree(path, ignore_errors=True)


def get_access(request: AttemptRequest) -> Access:
    """Return the read permissions of an attempt, and whether its evaluation tasks may run code."""
    return Access(
        request.allowed_roots,
        request.hub_organizations,
        request.code_tasks,
        files=request.files,
        traffic={deployment_id: CapturedTraffic(uri) for deployment_id, uri in request.traffic.items()} or None,
    )


def resolve_teacher(model: ModelSpec, workspace: Path, *, access: Access = UNRESTRICTED, fetch: bool = True) -> str:
    """Return a teacher that transformers can load: a directory, or an unchanged hub id if sources are unrestricted. A
    GGUF file is converted, and a PEFT adapter merged with its base, to a directory in this machine's cache.

    Args:
        workspace: destination of an `s3://` teacher.
        access: read permissions; they apply to all files of a directory.
        fetch: download an `s3://` teacher; False: another process has downloaded it to `workspace`.

    Raises:
        ModelError: an unknown built-in teacher, an empty address, or a model that requires code or forbidden files.
        InvalidInputError: a forbidden name, or a hub id that is also a path in the working directory.
    """
    download = make_model_download(workspace, access=access, field=MODEL_FIELD, fetch=fetch)
    return resolve_model_directory(
        model.name_or_path, model.revision, access=access, download=download, field=MODEL_FIELD
    )


def resolve_shared_teacher(model: ModelSpec, workspace: Workspace, *, access: Access) -> str:
    """Return what `resolve_teacher` returns, for all workers of a machine, of which one downloads. Collective."""
    path = resolve_teacher(model, workspace.path, access=access) if workspace.is_downloader else None
    Workers().gather(None)  # the others wait
    return path or resolve_teacher(model, workspace.path, access=access, fetch=False)


def uses_validation_rows(spec: JobSpec) -> bool:
    """Whether a share of the held-out texts steers the job's training, and is not reported."""
    return spec.training.validation is not None


class ObjectStoreFiles:
    """The `RemoteFiles` of data sources: objects of stores, and captured requests, downloaded to `workspace`."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace

    def list_files(self, source: S3Source) -> list[RemoteFile]:
        """List the objects at or below `source`. Raises `DataError` if there are none."""
        with open_source_bucket(source, DataError, field=_DATA_FIELD) as store:
            if source.key and store.head(source.key) is not None:
                return [RemoteFile(source.store, source.key)]
            objects = list_prefix(store, source, DataError, field=_DATA_FIELD)
            return [RemoteFile(source.store, each.key) for each in objects]

    def fetch_file(self, file: RemoteFile) -> Path:
        """Download an object, unless it exists already."""
        path = self.get_path(file)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            open_store(file.store).download_file(file.key, path)
        return path

    def fetch_traffic(self, uri: str, since: float, until: float) -> Path:
        """Download the captured requests of a window, unless their copy exists already. Waits until replicas have
        stored all of them, up to a minute after `until`, so that every attempt reads the same."""
        digest = hashlib.sha256(f"{uri} {since} {until}".encode()).hexdigest()
        path = self._workspace / f"traffic-{digest[:32]}.jsonl"
        if path.exists():
            return path
        delay = until + MAX_WRITE_DELAY_S - time.time()
        if delay > 0:
            get_logger().info("waiting_for_traffic", seconds=round(delay))
            time.sleep(delay)
        rows = TrafficReader(open_store(uri)).iterate_rows(since=since, until=until)
        with open_temporary(path) as temporary:
            with temporary.open("wb") as file:
                file.writelines(map(encode_row, rows))
            temporary.replace(path)
        return path

    def get_path(self, file: RemoteFile) -> Path:
        """Return the local path of an object, or of all objects below its key."""
        return self._workspace / file.store.removeprefix("s3://").strip("/") / file.key


def fetch_data(uri: str, workspace: Path) -> Path:
    """Download the object or prefix at an `s3://` address, and return its path below `workspace`. Raises `DataError` if
    there is no object."""
    files, source = ObjectStoreFiles(workspace), S3Source(uri)
    for file in files.list_files(source):
        files.fetch_file(file)
    return files.get_path(RemoteFile(source.store, source.key))


def load_tokenizer(spec: JobSpec, path: str) -> PreTrainedTokenizerBase:
    """Load the teacher's tokenizer. Raises `ModelError` if it is unreadable or has ids outside the teacher's
    vocabulary."""
    revision = spec.model.revision
    vocab_size = read_config(path, revision=revision).vocab_size
    tokenizer: PreTrainedTokenizerBase = tokenizers.load_tokenizer(path, vocab_size, revision=revision)
    return tokenizer


def write_companion_files(model: Any, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write all files of a student but its weights. Raises `ModelError` if transformers refuses to write them."""
    model.config.architectures = [type(model).__name__]
    source = str(model.config.name_or_path)
    with convert_errors(source, "transformers cannot write its configuration or tokenizer; correct its files"):
        model.config.save_pretrained(directory)
        # As the teacher has them: `save_pretrained` refuses values that transformers reads with a warning.
        model.generation_config.to_json_file(directory / GENERATION, keys_to_pop=["compile_config"])
        tokenizer.save_pretrained(directory)


def get_compute_dtype(spec: JobSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.model.dtype)
    return dtype


def load_student(spec: JobSpec, path: str) -> Any:
    """Load the student with copied projections, in the spec's dtype."""
    return make_student(path, spec.swiftkv.request, dtype=get_compute_dtype(spec), revision=spec.model.revision)


def open_lazy_student(
    spec: JobSpec, path: str, start: Mapping[str, Tensor] | None = None, *, device: torch.device | str = "cpu"
) -> LazyStudent:
    """Open the student in the spec's dtype without reading weights.

    Args:
        start: initial values of the student's own tensors; missing ones are copied from the teacher.
        device: device of the weights after reading.
    """
    return LazyStudent.open(
        path,
        spec.swiftkv.request,
        start or {},
        dtype=get_compute_dtype(spec),
        device=device,
        revision=spec.model.revision,
    )


def distribute_model(spec: JobSpec, path: str, start: Mapping[str, Tensor] | None, *, device: torch.device) -> Strategy:
    """Load teacher and student, and distribute them over the workers of the default process group. If parameters are
    sharded, a worker reads only its shards, module by module. `start`: initial values of the student's own tensors;
    None: copied from the teacher."""
    lazy = open_lazy_student(spec, path, start) if spec.sharding.shards_parameters else None
    student = lazy.model if lazy else load_student(spec, path)
    model = DistillationModel.from_spec(student, spec, device=device)
    if lazy is not None:
        lazy.map_parameters(model)
    elif start is not None:
        load_trained_tensors(student, start)
    if spec.training.compile:
        compile_layers(model)
    return parallelize(model, spec, dtype=get_compute_dtype(spec), device=device, weights=lazy)


def calibrate_student_if_needed(
    spec: JobSpec,
    stored: StoredInputs,
    path: str,
    rows: Path,
    *,
    device: torch.device | str,
    progress: Callable[[int, int], None],
) -> None:
    """Calibrate on the workers of the default process group and publish the calibrated start, unless it exists already.

    Args:
        path: path of the teacher.
        rows: directory of the prepared rows.
        progress: see `calibrate`.
    """
    workers = Workers()
    if workers.broadcast_from_first(workers.is_first and stored.needs_calibration):
        with tempfile.TemporaryDirectory(prefix="start-") as directory:
            calibrate(spec, path, PreparedData.load(rows).train, Path(directory), device=device, progress=progress)
            if workers.is_first:
                stored.publish_calibrated_start(Path(directory))
    workers.gather(None)  # the others wait


def calibrate(
    spec: JobSpec,
    path: str,
    rows: PackedRows,
    directory: Path,
    *,
    device: torch.device | str,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Calibrate on the workers of the default process group: each runs the teacher layer by layer over its share of the
    rows. The first worker writes the calibrated start to `directory`.

    Args:
        path: path of the teacher.
        rows: the training rows.
        progress: called on the first worker with (finished layers, total).
    """
    workers = Workers()
    batches = iter_calibration_batches(
        rows, spec.swiftkv.calibration_tokens, seed=spec.training.seed, share=workers.rank, num_shares=workers.size
    )
    source = open_lazy_student(spec, path, device=device)
    writer = ShardWriter(directory, "calibrated")
    tensors = calibrate_layerwise(
        source,
        batches,
        workers=workers,
        device=device,
        progress=progress if workers.is_first else lambda _done, _total: None,
    )
    for name, tensor in tensors:
        writer.add_tensor(name, tensor.to(source.model.dtype))
    writer.flush()
