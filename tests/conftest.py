"""Shared fixtures, created locally so that no test needs a network or a download."""

import atexit
import gc
import inspect
import multiprocessing.util
import os
import shutil
import sys
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("WANDB_API_KEY", None)  # without a key, runs are recorded offline
os.environ["NETRC"] = os.devnull
os.environ.pop("WANDB_MODE", None)
os.environ.pop("WANDB_DISABLED", None)

from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from swiftkv_platform.control_plane.database.session import Database
from tests.support.postgres import emptied, postgres_server
from tests.support.rays import become_a_driver
from tests.support.requirements import missing

become_a_driver()
multiprocessing.util.get_temp_dir()  # where parser processes are reached; tests replace the directory for such files

# Hypothesis searches for new counterexamples in `make soak`; elsewhere it repeats the same examples.
SOAK = "SWIFTKV_SOAK" in os.environ
settings.register_profile("repeatable", deadline=None, derandomize=not SOAK)
settings.load_profile("repeatable")


_SERVICES = ("postgres", "s3_server", "moto", "rclone", "seaweedfs", "browser")
"""Parts of the names of fixtures and parameters that start a server or a browser."""
_PROCESSES = {"subprocess", "multiprocessing", "Popen"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that start a service or a process as slow: their imports take seconds."""
    names = [item.name, *getattr(item, "fixturenames", ())]
    starts_a_service = any(service in name for service in _SERVICES for name in names)
    if starts_a_service or (isinstance(item, pytest.Function) and _starts_a_process(item)):
        item.add_marker("slow")
    if SOAK and _grows(item.module):
        item.add_marker("soak")


@cache
def _grows(module: ModuleType) -> bool:
    """Whether the module's sizes depend on the soak's variables."""
    return any(name in inspect.getsource(module) for name in ("SWIFTKV_SOAK", "SWIFTKV_SCHEDULES"))


def _starts_a_process(item: pytest.Function) -> bool:
    """Whether the test, a fixture of its module, or a test function that one of these calls, starts a process."""
    module = vars(item.module)
    names = {item.originalname, *item.fixturenames}
    for _ in range(2):
        found = [getattr(module.get(name), "_fixture_function", module.get(name)) for name in names]
        functions = [each for each in found if inspect.isfunction(each) and each.__module__.startswith("tests.")]
        names = {name for function in functions for name in function.__code__.co_names}
        if names & _PROCESSES:
            return True
    return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the soak's tests, and refuse tests with the same name, of which xdist would run only the first."""
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:
        message = f"several tests are called {', '.join(twice)}"
        raise ValueError(message)
    if not SOAK:
        left = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, whose passes would each take over a second."""
    gc.collect()
    gc.freeze()


_internal_errors: list[str] = []


def pytest_internalerror(excrepr: object) -> None:
    _internal_errors.append(str(excrepr))


_EXIT_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit here: threads of Ray and torch outlive the tests, and have crashed the interpreter's shutdown after the
    summary, which failed runs whose tests had passed."""
    status = config.stash.get(_EXIT_STATUS, None)
    if status is not None:
        if _internal_errors:  # the first is the cause, and has scrolled away
            print("pytest broke:", *_internal_errors[0].splitlines()[-15:], sep="\n")
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture
def native_kernels() -> None:
    """Skip the test if this machine cannot build or run the engine's kernels."""
    import torch

    from swiftkv_platform.engine import kernels

    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in kernels.VECTOR_FLAGS:
        pytest.skip(f"the processor has {capability}; the kernels need {' or '.join(kernels.VECTOR_FLAGS)}")
    if not kernels.is_available():
        missing("native kernels cannot be built or loaded; the log says why (Debian: apt-get install g++)")


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random 6-layer Llama (grouped-query attention) and a byte-level tokenizer with BOS and EOS."""
    from tests.support.tiny_models import save_teacher

    return save_teacher(tmp_path_factory.mktemp("tiny-teacher"))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with the newest schema, to copy."""
    path = tmp_path_factory.mktemp("database") / "empty.db"
    with closing(Database(f"sqlite:///{path}")) as database:
        database.upgrade()
    return path


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL database whose contents may be dropped."""
    with postgres_server() as url:
        yield url


@pytest.fixture
def sqlite_database(empty_database: Path, tmp_path: Path) -> Iterator[Database]:
    """An empty SQLite database with the newest schema."""
    shutil.copy(empty_database, tmp_path / "test.db")
    with closing(Database(f"sqlite:///{tmp_path / 'test.db'}")) as database:
        yield database


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty database of each kind with the newest schema."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_database")
        return
    with closing(Database(emptied(request.getfixturevalue("postgres_url")))) as database:
        database.upgrade()
        yield database
