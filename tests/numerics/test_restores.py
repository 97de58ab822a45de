"""Bytes of a checkpoint that each worker reads when it restores, counted at the store."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from swiftkv_platform.contract.attempts import MANIFEST, AttemptId, AttemptRequest, Parent
from swiftkv_platform.distillation.checkpoint import Checkpointer, RetryPolicy, load_training_state
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.partial_reads import INDEX_FILE
from swiftkv_platform.distillation.steering import TrainingProgress
from swiftkv_platform.distillation.strategy import Strategy
from swiftkv_platform.distillation.trainer import parallelize
from swiftkv_platform.errors import StorageError
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints, open_parent, open_trained_tensors
from swiftkv_platform.model import convert
from swiftkv_platform.storage.object_store import CHUNK_SIZE, ObjectStore, open_store
from tests.numerics.distillation_worker import job_spec
from tests.numerics.spawning import run_in_group
from tests.support.s3_servers import run_moto
from tests.support.tiny_models import random_teacher

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow("groups of processes")]
in_soak = pytest.mark.soak("a restore more")

SAVED_BY = 2
PREFIX = AttemptId("j", 1).checkpoints_prefix


@dataclass(frozen=True)
class Case:
    """A store, and how its workers save and restore checkpoints in it."""

    uri: str
    environment: Mapping[str, str]
    strategy: str = "fsdp2"
    parent: Parent | None = None
    with_optimizer: bool = False
    directory: str = ""


@dataclass(frozen=True)
class Restored:
    """A restored state, and how each worker read it."""

    digests: dict[str, str]
    """SHA-256 of each whole tensor of the state."""
    read: list[dict[str, int]]
    """Bytes read, for each worker by file."""
    step: int | None = None
    errors: list[str] | None = None

    @property
    def read_of_pieces(self) -> list[int]:
        return [
            sum(size for name, size in read.items() if not name.endswith((INDEX_FILE, MANIFEST))) for read in self.read
        ]


class CountingStore:
    """An object store that counts the bytes read of each object."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.read: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        for chunk in self._store.stream(key, chunk_size, start=start, stop=stop):
            self.read[key] = self.read.get(key, 0) + len(chunk)
            yield chunk


def _student() -> Any:
    """Return a student large enough that the headers of its checkpoint pieces hardly count."""
    teacher = random_teacher(hidden_size=256, intermediate_size=384, num_hidden_layers=5)
    return convert(teacher, num_key_value_layers=2, key_value_group_size=2)


def _build(case: Case) -> tuple[Strategy, CountingStore, Checkpointer]:
    os.environ.update(case.environment)
    spec = job_spec({"sharding": {"strategy": case.strategy}, "distillation": {"trainable": "tail"}})
    distillation_model = DistillationModel(_student(), spec.distillation, dtype=torch.float32)
    strategy = parallelize(distillation_model, spec, dtype=torch.float32, device=torch.device("cpu"))
    request, store = AttemptRequest(job_id="j", attempt=1, spec=spec, run_id="r"), CountingStore(open_store(case.uri))
    checkpoints = AttemptCheckpoints(store, request, keep=9)  # type: ignore[arg-type]
    retries = RetryPolicy(max_attempts=1)
    return strategy, store, Checkpointer(strategy, checkpoints, local_rank=dist.get_rank(), retry_policy=retries)


def save_two(case: Case) -> Restored:
    """Save two checkpoints one step apart, and return the digests of the second."""
    strategy, _, checkpointer = _build(case)
    for step in (1, 2):
        for parameter in strategy.module.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach().clone()
        strategy.step_optimizer(1e-3)
        checkpointer.save(TrainingProgress(step, 10 * step))
    checkpointer.finish()
    return Restored(_digests(strategy), [])


def restore(case: Case) -> Restored:
    """Restore the newest checkpoint."""
    strategy, store, checkpointer = _build(case)
    step = error = None
    try:
        step = checkpointer.restore().step
    except StorageError as failure:
        error = failure.message
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return Restored(_digests(strategy), _gathered(store), step, errors)


def go_back(case: Case) -> Restored:
    """Roll back to the first checkpoint."""
    strategy, store, checkpointer = _build(case)
    checkpointer.roll_back(1)
    return Restored(_digests(strategy), _gathered(store))


def start_from_parent(case: Case) -> Restored:
    """Start from a parent, as the train loop does when workers load parts."""
    strategy, store, _ = _build(case)
    directory = Path(case.directory) / str(dist.get_world_size())
    files = open_parent(store, case.parent, directory, is_downloader=dist.get_rank() == 0)  # type: ignore[arg-type]
    dist.barrier()
    if case.with_optimizer:
        load_training_state(strategy, directory, files.read)
    else:
        assert strategy.load_trained_tensors(open_trained_tensors(case.parent, directory, files)) == []
    return Restored(_digests(strategy), _gathered(store))


def _gathered(store: CountingStore) -> list[dict[str, int]]:
    read: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(read, store.read)
    return read


def _digests(strategy: Strategy) -> dict[str, str]:
    found: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(f"{name}.{key}", each)
        elif isinstance(value, Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()

    add("", strategy.get_state())
    return found


def _run(function: Any, case: Case, world_size: int, path: Path) -> Restored:
    restored: Restored = run_in_group(function, (case,), world_size, path / f"{function.__name__}-{world_size}")
    return restored


@dataclass(frozen=True)
class Saved:
    case: Case
    digests: dict[str, str]
    size: int
    """Size of the newest checkpoint's pieces."""


@pytest.fixture(scope="module", params=["local", pytest.param("moto", marks=pytest.mark.soak("every restore from S3"))])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    path = tmp_path_factory.mktemp("saved")
    serving: AbstractContextManager[Any] = run_moto() if request.param == "moto" else nullcontext()
    with serving as server, pytest.MonkeyPatch.context() as patch:
        environment = {} if server is None else server.environment
        for name, value in environment.items():
            patch.setenv(name, value)
        case = Case(str(path / "store") if server is None else server.uri("restores"), environment)
        before = _run(save_two, case, SAVED_BY, path)
        newest = _newest(open_store(case.uri))
        pieces = [info.size for info in open_store(case.uri).list(newest) if info.key.endswith(".distcp")]
        yield Saved(case, before.digests, sum(pieces))


def _newest(store: ObjectStore) -> str:
    return f"{PREFIX}/{store.list_directories(PREFIX)[-1]}"


@pytest.mark.parametrize("world_size", [pytest.param(SAVED_BY, marks=in_soak), 3, pytest.param(4, marks=in_soak)])
def test_a_worker_that_goes_on_reads_its_own_part(saved: Saved, world_size: int, tmp_path: Path) -> None:
    """Two workers saved the pieces; three or four workers read rows of each."""
    restored = _run(restore, saved.case, world_size, tmp_path)
    assert restored.step == 2
    assert restored.digests == saved.digests
    assert max(restored.read_of_pieces) < 1.2 * saved.size / world_size
    assert [any(name.endswith(INDEX_FILE) for name in read) for read in restored.read] == [True] + [False] * (
        world_size - 1
    )


def test_a_worker_that_goes_back_reads_its_own_part(saved: Saved, tmp_path: Path) -> None:
    """Without sharding, a machine reads the checkpoint once for all of its workers."""
    back = _run(go_back, saved.case, SAVED_BY, tmp_path)
    assert back.digests.keys() == saved.digests.keys()
    assert back.digests != saved.digests
    assert max(back.read_of_pieces) < 1.2 * saved.size / SAVED_BY
    restored = _run(restore, replace(saved.case, strategy="ddp"), SAVED_BY, tmp_path)
    assert restored.digests == saved.digests
    assert restored.read_of_pieces == [saved.size, 0]


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_worker_reads_its_own_part_of_a_parent(saved: Saved, with_optimizer: bool, tmp_path: Path) -> None:
    key = _newest(open_store(saved.case.uri))
    parent = Parent(name="job_a:2", kind="checkpoint", key=key, job_id="j", sha256="")
    case = replace(saved.case, parent=parent, with_optimizer=with_optimizer, directory=str(tmp_path / "parent"))
    started = _run(start_from_parent, case, 4, tmp_path)
    expected = {name: digest for name, digest in saved.digests.items() if with_optimizer or "optimizer" not in name}
    assert {name: started.digests[name] for name in expected} == expected
    share = saved.size if with_optimizer else saved.size / 3
    assert max(started.read_of_pieces) < 1.2 * share / 4


@pytest.mark.parametrize(
    "damage", ["flipped", pytest.param("short", marks=in_soak), pytest.param("missing", marks=in_soak)]
)
def test_a_damaged_checkpoint_is_passed_over_and_the_last_one_refused(
    saved: Saved, damage: str, tmp_path: Path
) -> None:
    """Damage one file of the newest checkpoint, then of the older one too, in a separate copy of the store."""
    source, case = open_store(saved.case.uri), replace(saved.case, uri=str(tmp_path / "store"))
    store = open_store(case.uri)
    for info in source.list(PREFIX):
        store.put_bytes(info.key, source.get_bytes(info.key))
    older, newest = store.list_directories(PREFIX)
    for name in (newest, older):
        key = f"{PREFIX}/{name}/__1_0.distcp"
        data = bytearray(store.get_bytes(key))
        data[len(data) // 2] ^= 1
        if damage == "missing":
            store.delete(key)
        else:
            store.put_bytes(key, bytes(data) if damage == "flipped" else bytes(data[:-1]))
        (tmp_path / name).mkdir()
        restored = _run(restore, case, SAVED_BY, tmp_path / name)
        if name == newest:
            assert restored.step == 1
    assert restored.step is None
    assert len(set(restored.errors)) == 1, "all workers raise the same error"
    assert "__1_0.distcp" in restored.errors[0]
