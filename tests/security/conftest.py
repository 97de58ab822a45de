"""Control planes with keys and tenants, behind a socket, for many threads at once; issuers of tokens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.security.tokens import JWTVerifier
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.components import make_components
from tests.support.fakes.oidc_issuer import Issuer, run_issuer, write_issuers
from tests.support.records import make_job, make_model, store
from tests.support.servers import serving
from tests.support.threads import MOST_THREADS
from tests.unit.control_plane.routes.conftest import StillClock, parts, short_logs, start

__all__ = ["parts", "short_logs", "start"]


@dataclass
class DeploymentPlane:
    """A control plane in which every tenant gets a key when it is first named."""

    url: str
    parts: Components
    settings: Settings
    client: httpx.Client
    app: FastAPI

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}

    def headers(self, tenant: str) -> dict[str, str]:
        """Headers with an admin key of the tenant; empty if the control plane has no keys."""
        path = self.settings.api_keys_file
        if path is None:
            return {}
        with self._lock:
            if tenant not in self._tokens:
                name, scopes = f"{tenant}-{uuid4().hex}", frozenset({Scope.ADMIN})
                self._tokens[tenant] = create_key(path, name=name, tenant=tenant, scopes=scopes)
        return {"authorization": f"Bearer {self._tokens[tenant]}"}

    def ask(
        self, tenant: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return self.client.request(method, path, json=body, headers={**self.headers(tenant), **(headers or {})})

    def model(self, tenant: str) -> str:
        """Store a model that the tenant has distilled; return its id."""
        assert isinstance(self.parts.jobs, JobRepository)
        job = store(self.parts.jobs, replace(make_job(tenant=tenant), status=JobStatus.SUCCEEDED))  # it never starts
        model = make_model(job)
        self.parts.jobs.update(job, model=model)
        return model.id

    def deploy(self, tenant: str, model: str | None = None, **options: Any) -> httpx.Response:
        return self.ask(tenant, "POST", "/deployments", {"model": model or self.model(tenant), **options})

    def deployed(self, tenant: str, model: str | None = None, **options: Any) -> dict[str, Any]:
        response = self.deploy(tenant, model, **options)
        assert response.status_code == 201, response.text
        answer: dict[str, Any] = response.json()
        return answer


@contextmanager
def deployment_plane(
    directory: Path, database: Database, *, tenants: str | None = None, keys: bool = True, **settings: Any
) -> Iterator[DeploymentPlane]:
    """Run a control plane on the database. Unless `settings` say otherwise, its loops turn once and then sleep.

    Args:
        tenants: text of the tenants file.
    """
    objects = LocalObjectStore(directory / "store")
    parts = make_components(database, objects)
    if tenants is not None:
        (directory / "tenants.yaml").write_text(tenants)
        parts = replace(parts, policies=TenantPolicies(directory / "tenants.yaml"))
    if keys and not (directory / "keys.json").exists():
        create_key(directory / "keys.json", name="operator", tenant="operators", scopes=frozenset({Scope.ADMIN}))
    chosen = Settings(
        home=directory,
        api_keys_file=directory / "keys.json" if keys else None,
        requests_per_minute=100_000,
        _env_file=None,
        **{"reconcile_interval_s": 1e6, **settings},
    )
    limits = httpx.Limits(max_connections=MOST_THREADS)
    app = create_app(chosen, components=parts)
    with (
        serving(app) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=60, limits=limits) as client,
    ):
        yield DeploymentPlane(url, parts, chosen, client, app)


@pytest.fixture
def plane(tmp_path: Path, sqlite_database: Database) -> Iterator[DeploymentPlane]:
    with deployment_plane(tmp_path, sqlite_database) as plane:
        yield plane


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with run_issuer() as issuer:
        yield issuer


@pytest.fixture
def oidc_file(tmp_path: Path, issuer: Issuer) -> Path:
    return write_issuers(tmp_path / "issuers.yaml", issuer.config())


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def verifier(oidc_file: Path, clock: StillClock) -> JWTVerifier:
    return JWTVerifier(oidc_file, clock=clock)
