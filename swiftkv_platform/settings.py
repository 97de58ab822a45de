"""Settings from environment variables `SWIFTKV_<FIELD>`. Credentials of S3, W&B and the hub are not settings: their
libraries read `AWS_*`, `WANDB_API_KEY` and `HF_TOKEN`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.limits import (
    BODY_BYTES,
    CONCURRENT_BODY_BYTES,
    CONNECTIONS,
    FILE_BYTES,
    FILE_ROWS,
    FOLLOWED_LOGS,
    FOLLOWED_LOGS_OF_KEY,
    FOLLOWED_LOGS_OF_TENANT,
    IMPORT_BYTES,
    REQUEST_HEAD_SECONDS,
    REQUESTS_PER_MINUTE,
    STREAMS,
    STREAMS_OF_KEY,
    STREAMS_OF_TENANT,
    TIME_SLICE_SECONDS,
)


def get_default_home() -> Path:
    """Return `~/.swiftkv`, the default directory of database, object store, logs and pid files."""
    return Path.home() / ".swiftkv"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def get_default_keys_file(home: Path) -> Path:
    """Return the default of `api_keys_file`."""
    return home / "keys.json"


def _find_default_keys_file(values: Mapping[str, Any]) -> Path | None:
    """Return the default API keys file if it exists. An inaccessible file counts as existing: opening it fails, so that
    nothing starts without keys by mistake."""
    path = get_default_keys_file(values["home"])
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass
    return path


def _find_serve_file(name: str, values: Mapping[str, Any]) -> Path | None:
    """Return the control plane's file `name` if Ray Serve runs on this machine."""
    address = urlsplit(values["serve_dashboard_url"] or values["ray_dashboard_url"])
    path: Path | None = values[name]
    return path.absolute() if path is not None and is_loopback(address.hostname or "") else None


Days = Annotated[float, Field(ge=0.0)]


ResourceName = Annotated[str, Field(pattern=r"^(CPU|GPU|memory|accelerator_type:\S+)$")]


class NodeGroup(FrozenBaseModel):
    """Nodes of one kind that Ray's autoscaler adds."""

    max_nodes: Annotated[int, Field(ge=1)]
    resources: dict[ResourceName, Annotated[float, Field(ge=0.0)]]
    """Resources of a node by Ray's names: `CPU`, `GPU`, `memory` (bytes), `accelerator_type:H100`."""

    def describe(self) -> str:
        """Return e.g. `2 nodes with 8 CPU, 1 GPU`."""
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.resources.items() if name != "memory")
        return f"{self.max_nodes} {'node' if self.max_nodes == 1 else 'nodes'} with {each}"


class Settings(BaseSettings):
    """Settings of the control plane and the command line."""

    model_config = SettingsConfigDict(env_prefix="SWIFTKV_", frozen=True, extra="forbid", use_attribute_docstrings=True)

    home: Annotated[Path, AfterValidator(Path.expanduser)] = Field(default_factory=get_default_home)
    """Directory of the database, object store, logs and keys, unless other settings change these."""
    database_url: str | None = None
    """SQLAlchemy URL; None is SQLite at `{home}/swiftkv.db`."""
    database_connect_timeout_s: Annotated[int, Field(ge=2, le=600)] = 10
    """Max seconds to connect to PostgreSQL. SQLite ignores this and the next three settings."""
    database_statement_timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 30.0
    """Max seconds per statement, except in migrations. The control plane drops the connection 10 seconds later."""
    database_tcp_timeout_s: Annotated[int, Field(ge=4, le=3600)] = 30
    """Seconds without TCP acknowledgement after which a connection is closed."""
    database_pool_recycle_s: Annotated[int, Field(ge=1)] = 1800
    """Max age of a connection in seconds."""
    storage_uri: str | None = None
    """Object store: directory, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`; None is
    `{home}/store`. Endpoint, region and keys come from the variables of S3, Google and Azure."""
    ray_dashboard_url: str = "http://127.0.0.1:8265"
    """URL of Ray's dashboard, with its job and Serve APIs."""
    serve_dashboard_url: str | None = None
    """URL of the Ray dashboard for deployments on a separate Ray cluster; None: `ray_dashboard_url`."""
    entrypoint_num_cpus: Annotated[float, Field(ge=0.0)] = 0.0
    """CPUs that Ray reserves per job driver. With 0 CPUs and 0 bytes, drivers run on Ray's head node without a
    reservation; else they run on any node with free resources."""
    entrypoint_memory: Annotated[int, Field(ge=0)] = 0
    """Bytes that Ray reserves per job driver; a driver takes about 400 MB."""
    node_groups: dict[str, NodeGroup] = {}
    """Node groups of Ray's autoscaler v2, by name, as JSON:
    `{"gpu": {"max_nodes": 8, "resources": {"CPU": 8, "GPU": 1}}}`. Jobs wait in the queue until these groups and the
    running nodes have enough resources, and are rejected if they can never fit. Without this setting, a job on an
    autoscaling cluster starts at once and waits in its attempt, since Ray does not report its groups."""
    serve_url: str = "http://127.0.0.1:8001"
    """URL of Ray Serve's HTTP proxy."""
    source_roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes that specs may read; `{tenant}` is replaced by the caller's tenant. The hub and
    built-in sources are always allowed. None: all sources are allowed without authentication, no others with it."""
    publish_targets: tuple[str, ...] = ()
    """Targets that jobs may publish models to: `hf://organization`, `s3://bucket/prefix`, directories; `{tenant}` is
    replaced by the caller's tenant. Empty by default, since workers write with their own credentials."""
    allow_code_tasks: bool = False
    """Allow evaluation tasks to execute code on workers, with the workers' permissions: model output (HumanEval, MBPP,
    sympy tasks) or metrics from the hub."""
    teacher_origins: tuple[str, ...] | None = None
    """Allowed origins of `data.sources[].complete.endpoint`, the servers to which workers send prompts and
    `TEACHER_API_KEY`: `https://host`, `https://*.domain`, `http://host:port`. None: all origins are allowed
    without authentication, none with it."""
    model_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Max bytes of models that a machine caches for its replicas at `{home}/models`; set it on replica machines. With
    0, each replica and each swap downloads its model again."""
    start_timeout_s: Annotated[float, Field(ge=10.0, le=3600.0)] = 180.0
    """Max seconds that `swiftkv up` waits for Ray, and then for the control plane. A part that fails is started once
    more."""
    host: str = "127.0.0.1"
    """Address that the control plane listens on; without API keys only loopback is allowed."""
    api_keys_file: Path | None = Field(default_factory=_find_default_keys_file)
    """File of hashed API keys (see `swiftkv keys create`). Default: `{home}/keys.json` if it exists. Without a file,
    all requests from this machine are accepted."""
    oidc_file: Path | None = None
    """YAML file of OpenID Connect issuers whose bearer tokens are accepted besides API keys (docs/operations.md)."""
    serve_api_keys_file: Path | None = Field(default_factory=partial(_find_serve_file, "api_keys_file"))
    """Path of an API keys file on Ray's nodes: deployments then require their tenant's keys with the scope `generate`.
    Default: `api_keys_file` if Ray's dashboard has a loopback address. Without a file, deployments accept all requests
    to `serve_url`."""
    serve_oidc_file: Path | None = Field(default_factory=partial(_find_serve_file, "oidc_file"))
    """Path of an OIDC file on Ray's nodes: deployments then accept tokens as well. Default: as `serve_api_keys_file`,
    with `oidc_file`."""
    tenants_file: Path | None = None
    """YAML file of tenants' quotas and weights (docs/operations.md). None: default limits for all tenants."""
    gpu_hour_price: Annotated[float, Field(ge=0.0)] | None = None
    """Price per GPU hour. Without prices, jobs have no cost and `limits.cost_cap` is rejected."""
    cpu_hour_price: Annotated[float, Field(ge=0.0)] | None = None
    """Price per CPU core hour."""
    flops_per_second: Annotated[float, Field(gt=0.0)] | None = None
    """FLOPs per second of a worker, for time estimates until a similar job has finished. None: an assumed share of a
    known GPU's peak."""
    webhook_origins: tuple[str, ...] = ()
    """Allowed origins of webhooks: `https://host`, `https://*.domain`, `http://host:port`. Empty: webhooks are
    rejected."""
    secrets_dir: Path | None = None
    """Directory of webhook signing secrets, one file `{tenant}/{name}` each."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    reconcile_interval_s: Annotated[float, Field(gt=0.0)] = 1.0
    """Seconds between rounds of the reconciler."""
    max_running_jobs: Annotated[int, Field(ge=1)] = 1
    """Max concurrent jobs on Ray, over all tenants; other jobs wait in the queue."""
    max_deployment_replicas: Annotated[int, Field(ge=1)] = 64
    """Max replicas per deployment. Quotas limit the replicas per tenant."""
    deployments_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Max share of the cluster's CPUs and GPUs for replicas of all deployments, each rounded up; the rest is for jobs.
    None: 0.5 with authentication and a cluster shared with jobs, else 1."""
    placement_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """Max seconds that an attempt waits for the placement of its workers before training. The job is then queued again,
    without using a retry."""
    turn_s: Annotated[float, Field(gt=0.0)] | None = TIME_SLICE_SECONDS.default
    """Time slice in seconds: how long an attempt runs while another tenant's job waits. It then saves a checkpoint and
    the job is queued again, without using a retry. The slice doubles per attempt that does not reach training, up to
    16 times this value. None: no limit."""
    max_runtime_s: Annotated[int, Field(ge=1)] | None = None
    """Max seconds per attempt; `limits.max_runtime_s` in a spec can lower it. None: only the spec's limit."""
    max_workers_per_job: Annotated[int, Field(ge=1)] = 1024
    """Max workers per job, over all concurrent trials of a sweep."""
    max_batch_size: Annotated[int, Field(ge=1)] = 65536
    """Max `training.batch_size`, and max rows per forward pass of a worker."""
    max_request_bytes: Annotated[int, Field(ge=1024)] = BODY_BYTES.default
    """Max bytes per request body; larger requests get 413."""
    max_body_bytes_at_once: Annotated[int, Field(ge=1024)] = CONCURRENT_BODY_BYTES.default
    """Max bytes of request bodies of all concurrent requests. A tenant may use a quarter and a key an eighth; further
    requests get 429. File uploads have separate limits."""
    max_streams: Annotated[int, Field(ge=1)] = STREAMS.default
    """Max concurrent streaming responses (events, logs, files, generation); further requests get 429."""
    max_streams_of_tenant: Annotated[int, Field(ge=1)] = STREAMS_OF_TENANT.default
    max_streams_of_key: Annotated[int, Field(ge=1)] = STREAMS_OF_KEY.default
    max_followed_logs: Annotated[int, Field(ge=1)] = FOLLOWED_LOGS.default
    """Max concurrently followed logs. Each is also a stream, and holds a connection to Ray."""
    max_followed_logs_of_tenant: Annotated[int, Field(ge=1)] = FOLLOWED_LOGS_OF_TENANT.default
    max_followed_logs_of_key: Annotated[int, Field(ge=1)] = FOLLOWED_LOGS_OF_KEY.default
    max_connections: Annotated[int, Field(ge=1)] = CONNECTIONS.default
    """Max open connections, and max half of the process's open files; half per client address. A new connection closes
    the longest idle one, or is closed itself if none is idle."""
    request_head_timeout_s: Annotated[float, Field(gt=0.0)] = REQUEST_HEAD_SECONDS.default
    """Max seconds from opening a connection to a complete request head."""
    max_file_bytes: Annotated[int, Field(ge=1024)] = FILE_BYTES.default
    """Max bytes per uploaded file; the tenants file can lower it. Uploads use the temporary directory."""
    max_file_rows: Annotated[int, Field(ge=1)] = FILE_ROWS.default
    """Max rows per uploaded file; the tenants file can lower it."""
    max_import_bytes: Annotated[int, Field(ge=1024)] = IMPORT_BYTES.default
    """Max bytes per imported model."""
    max_log_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30)] = 16 << 20
    """Max stored bytes of an ended attempt's log: half from the beginning, half from the end, with a line about the
    gap. Storing a log needs up to 1.5 times as many bytes of temporary files."""
    sweep_interval_s: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds between rounds of retention, which deletes data older than the `retention_*_days` settings below; a value
    of 0 days keeps that data forever.
    Data that is deployed, promoted, resumable or used by an unfinished job is never deleted."""
    retention_events_days: Days = 30.0
    """Days from a job's end until its events are deleted from the database, except status changes."""
    retention_metrics_days: Days = 30.0
    """Days from a job's end until its metrics are downsampled to `retention_metric_points`."""
    retention_metric_points: Annotated[int, Field(ge=2)] = 500
    """Number of points after downsampling."""
    retention_event_objects_days: Days = 1.0
    """Days from a job's end until its event objects are deleted from the store; the database has these events."""
    retention_prepared_data_days: Days = 1.0
    """Days from a job's end until leftover prepared rows, initial weights and completions are deleted."""
    retention_checkpoints_days: Days = 7.0
    """Days from a job's end until its checkpoints are deleted; a paused job has not ended."""
    retention_logs_days: Days = 90.0
    """Days from a job's end until its attempts' logs are deleted."""
    retention_tracking_days: Days = 30.0
    """Days from a job's end until the files of its offline W&B runs are deleted."""
    retention_deliveries_days: Days = 30.0
    """Days from the delivery or final failure of a webhook until its record is deleted."""
    retention_idempotency_keys_days: Days = 30.0
    """Days for which an `Idempotency-Key` returns its job."""
    retention_promotions_days: Days = 365.0
    """Days of an alias's history; its `retention_rollbacks` newest models are kept at any age."""
    retention_rollbacks: Annotated[int, Field(ge=1)] = 5
    """Number of models per alias kept for rollback, including the current one."""
    retention_audit_days: Days = 365.0
    """Days until an audit entry is deleted."""
    retention_models_days: Days = 0.0
    """Days from a newer model of the same name until an unused model is deleted."""
    retention_jobs_days: Days = 365.0
    """Days from a job's end until its record and remaining data are deleted; jobs with a model are kept."""
    requests_per_minute: Annotated[int, Field(ge=1)] = REQUESTS_PER_MINUTE.default
    """Max requests per minute per API key and control plane, with bursts of a tenth; further requests get 429."""
    session_lifetime_s: Annotated[int, Field(ge=60, le=30 * 86400)] = 12 * 3600
    """Lifetime of a dashboard session in seconds."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks (`10.0.0.0/8`) whose `X-Forwarded-Proto` and `X-Forwarded-For` are trusted: these decide
    whether cookies are `Secure`, and the address of a sign-in. Clients in these networks can forge their address."""
    allowed_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")
    """Allowed Host headers without API keys (against DNS rebinding). Deployments without keys also allow IP addresses
    and local names."""

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'swiftkv.db'}"

    @property
    def resolved_serve_dashboard_url(self) -> str:
        return self.serve_dashboard_url or self.ray_dashboard_url

    @property
    def requires_credentials(self) -> bool:
        """Whether requests need an API key or token; otherwise all callers are one local tenant."""
        return self.api_keys_file is not None or self.oidc_file is not None

    @property
    def resolved_source_roots(self) -> tuple[str, ...] | None:
        return () if self.source_roots is None and self.requires_credentials else self.source_roots

    @property
    def resolved_teacher_origins(self) -> tuple[str, ...] | None:
        return () if self.teacher_origins is None and self.requires_credentials else self.teacher_origins

    @property
    def resolved_deployments_share(self) -> float:
        is_shared = self.requires_credentials and self.serve_dashboard_url is None
        return self.deployments_share or (0.5 if is_shared else 1.0)

    @property
    def resolved_storage_uri(self) -> str:
        return self.storage_uri or str(self.home / "store")
