"""The process environment as one frozen object. Every variable is `SWIFTKV_<FIELD>`; credentials of S3, W&B and the hub
keep the names their own libraries read (`AWS_*`, `WANDB_API_KEY`, `HF_TOKEN`) and never pass through here.
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

from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.limits import (
    BODY_BYTES,
    CONCURRENT_BODY_BYTES,
    CONNECTIONS,
    FILE_BYTES,
    FILE_ROWS,
    FOLLOWED_LOGS,
    FOLLOWED_LOGS_OF_KEY,
    FOLLOWED_LOGS_OF_TENANT,
    HEAD_SECONDS,
    IMPORT_BYTES,
    REQUESTS_PER_MINUTE,
    STREAMS,
    STREAMS_OF_KEY,
    STREAMS_OF_TENANT,
    TIME_SLICE_SECONDS,
)


def get_default_home() -> Path:
    """Return `~/.swiftkv`, where a machine without configuration keeps databases, stores, logs and pids."""
    return Path.home() / ".swiftkv"


def is_loopback(host: str) -> bool:
    """Whether a host name or address is reachable from its own machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def get_default_keys_file(home: Path) -> Path:
    """Return the file of API keys that holds unless `api_keys_file` names another one."""
    return home / "keys.json"


def _find_default_keys_file(values: Mapping[str, Any]) -> Path | None:
    """Return the default file of API keys unless it does not exist. A file that cannot be looked up counts as existing:
    opening it then fails, and nothing starts without keys by mistake."""
    path = get_default_keys_file(values["home"])
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass
    return path


def _find_serve_file(name: str, values: Mapping[str, Any]) -> Path | None:
    """Return the control plane's own file `name` if Ray Serve runs on this machine, which then has the same files."""
    address = urlsplit(values["serve_dashboard_url"] or values["ray_dashboard_url"])
    path: Path | None = values[name]
    return path.absolute() if path is not None and is_loopback(address.hostname or "") else None


Days = Annotated[float, Field(ge=0.0)]


ResourceName = Annotated[str, Field(pattern=r"^(CPU|GPU|memory|accelerator_type:\S+)$")]


class NodeGroup(FrozenModel):
    """Nodes of one kind that Ray's autoscaler adds."""

    max_nodes: Annotated[int, Field(ge=1)]
    resources: dict[ResourceName, Annotated[float, Field(ge=0.0)]]
    """Resources of a node by Ray's names: `CPU`, `GPU`, `memory` (bytes), `accelerator_type:H100`."""

    def described(self) -> str:
        """Return the group in words: `2 nodes with 8 CPU, 1 GPU`."""
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.resources.items() if name != "memory")
        return f"{self.max_nodes} {'node' if self.max_nodes == 1 else 'nodes'} with {each}"


class Settings(BaseSettings):
    """Settings of the control plane and of the command line."""

    model_config = SettingsConfigDict(env_prefix="SWIFTKV_", frozen=True, extra="forbid", use_attribute_docstrings=True)

    home: Annotated[Path, AfterValidator(Path.expanduser)] = Field(default_factory=get_default_home)
    """Directory for everything that no other setting places elsewhere."""
    database_url: str | None = None
    """SQLAlchemy URL; None is SQLite at `{home}/swiftkv.db`."""
    database_connect_timeout_s: Annotated[int, Field(ge=2, le=600)] = 10
    """Seconds to wait for a connection to PostgreSQL; SQLite ignores this and the three settings that follow."""
    database_statement_timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 30.0
    """Seconds for one statement, except in migrations. Ten seconds later the control plane drops the connection."""
    database_tcp_timeout_s: Annotated[int, Field(ge=4, le=3600)] = 30
    """Seconds until a connection whose packets get no acknowledgement counts as lost."""
    database_pool_recycle_s: Annotated[int, Field(ge=1)] = 1800
    """Age in seconds at which a connection is replaced."""
    storage_uri: str | None = None
    """Object store: directory, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`; None is
    `{home}/store`. Endpoint, region and keys come from the variables of S3, Google and Azure."""
    ray_dashboard_url: str = "http://127.0.0.1:8265"
    """Address of Ray's job and serve APIs."""
    serve_dashboard_url: str | None = None
    """Address of the serve API if deployments have their own Ray cluster; None: `ray_dashboard_url`."""
    entrypoint_num_cpus: Annotated[float, Field(ge=0.0)] = 0.0
    """CPUs that Ray reserves for the driver of each job. With 0 CPUs and 0 bytes, drivers run on Ray's head node and
    reserve nothing, which leaves a machine of two cores to the workers; else they run on any node with room."""
    entrypoint_memory: Annotated[int, Field(ge=0)] = 0
    """Bytes that Ray reserves for the driver of each job; a driver takes some 400 MB."""
    node_groups: dict[str, NodeGroup] = {}
    """Groups of nodes that Ray's autoscaler v2 adds, by name, as JSON:
    `{"gpu": {"max_nodes": 8, "resources": {"CPU": 8, "GPU": 1}}}`. Jobs then wait in the queue until these groups and
    the present nodes have room, and are refused if they never could. Ray does not report its groups: without this
    setting a job on a growing cluster starts at once and waits in its attempt."""
    serve_url: str = "http://127.0.0.1:8001"
    """Address of Ray Serve's HTTP proxy."""
    source_roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes that specs may read; `{tenant}` is replaced by the caller's tenant. The hub and
    built-in sources are always open. None: everything is open, or nothing else if callers need keys or tokens."""
    publish_targets: tuple[str, ...] = ()
    """Places that jobs may publish models to: `hf://organization`, `s3://bucket/prefix`, directories; `{tenant}` is
    replaced by the caller's tenant. Empty by default, since workers write there with their own credentials."""
    allow_code_tasks: bool = False
    """Let evaluation tasks run text as code on the workers, with the workers' access: code that a model writes
    (HumanEval, MBPP, tasks that pass answers to sympy) or a metric from the hub."""
    model_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of models that a machine caches for its replicas at `{home}/models`; set it where replicas run. With 0 each
    replica, and each swap, fetches its model again."""
    host: str = "127.0.0.1"
    """Address the control plane listens on; without API keys only loopback is allowed."""
    api_keys_file: Path | None = Field(default_factory=_find_default_keys_file)
    """File of hashed API keys (`swiftkv keys create` writes it). Default: `{home}/keys.json` if it exists; without a
    file, every request from this machine is accepted."""
    oidc_file: Path | None = None
    """YAML file of OpenID Connect issuers whose bearer tokens are accepted as well as keys (docs/operations.md)."""
    serve_api_keys_file: Path | None = Field(default_factory=partial(_find_serve_file, "api_keys_file"))
    """Path on Ray's nodes of `api_keys_file` or another such file: deployments then accept their tenant's keys with the
    scope `generate`. Default: `api_keys_file` if Ray's dashboard has a loopback address; without a file, deployments
    answer every request that reaches `serve_url`."""
    serve_oidc_file: Path | None = Field(default_factory=partial(_find_serve_file, "oidc_file"))
    """Path on Ray's nodes of `oidc_file` or another such file: deployments then accept tokens as well. Default: as for
    `serve_api_keys_file`."""
    tenants_file: Path | None = None
    """YAML file of quotas and weights (docs/operations.md). None: every tenant has the default limits."""
    gpu_hour_price: Annotated[float, Field(ge=0.0)] | None = None
    """Price of a GPU for an hour; without prices jobs have no cost and `limits.cost_cap` is refused."""
    cpu_hour_price: Annotated[float, Field(ge=0.0)] | None = None
    """Price of a CPU core for an hour."""
    flops_per_second: Annotated[float, Field(gt=0.0)] | None = None
    """FLOPs per second of one worker, for the time estimate of a job until a similar one has been
    measured; None: an assumed share of a known GPU's peak."""
    webhook_origins: tuple[str, ...] = ()
    """Origins that webhooks may be sent to: `https://host`, `https://*.domain`, `http://host:port`. Empty: webhooks
    are refused."""
    secrets_dir: Path | None = None
    """Directory of the named secrets that sign webhooks, one file `{tenant}/{name}` each."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    reconcile_interval_s: Annotated[float, Field(gt=0.0)] = 1.0
    """Seconds between two rounds of the reconciler."""
    max_running_jobs: Annotated[int, Field(ge=1)] = 1
    """Jobs of all tenants that run on Ray at the same time; the rest wait in the queue."""
    max_deployment_replicas: Annotated[int, Field(ge=1)] = 64
    """Maximum replicas of one deployment; quotas limit all deployments of a tenant together."""
    deployments_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the cluster's CPUs and GPUs that the replicas of all deployments may have, each rounded up; the rest is
    for jobs. None: half if callers need keys or tokens and deployments share the jobs' cluster, else all."""
    placement_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """Seconds that an attempt that has not trained may hold its slot while its workers cannot be placed; then the job
    is queued again, which uses no retry."""
    turn_s: Annotated[float, Field(gt=0.0)] | None = TIME_SLICE_SECONDS.default
    """Seconds that an attempt may hold its slot while another tenant's job waits for it; then it checkpoints and the
    job is queued again, which uses no retry. An attempt that is not training has twice as long as the one before, up
    to 16 times this value. None: no limit."""
    max_runtime_s: Annotated[int, Field(ge=1)] | None = None
    """Maximum seconds of an attempt; `limits.max_runtime_s` may ask for less. None leaves it to specs."""
    max_workers_per_job: Annotated[int, Field(ge=1)] = 1024
    """Maximum workers of a job, over all trials of a sweep that run at the same time."""
    max_batch_size: Annotated[int, Field(ge=1)] = 65536
    """Maximum `training.batch_size`, and rows in one pass of a worker, that a job may ask for."""
    max_request_bytes: Annotated[int, Field(ge=1024)] = BODY_BYTES.default
    """Maximum bytes of a request body; a larger one gets 413."""
    max_body_bytes_at_once: Annotated[int, Field(ge=1024)] = CONCURRENT_BODY_BYTES.default
    """Maximum bytes of request bodies that are being read or whose requests are not answered yet. A tenant may use a
    quarter and a key an eighth; requests beyond that get 429. Uploads of files are limited separately."""
    max_streams: Annotated[int, Field(ge=1)] = STREAMS.default
    """Maximum concurrent streaming responses: events, logs, files, answers of deployments; more get 429."""
    max_streams_of_tenant: Annotated[int, Field(ge=1)] = STREAMS_OF_TENANT.default
    max_streams_of_key: Annotated[int, Field(ge=1)] = STREAMS_OF_KEY.default
    max_followed_logs: Annotated[int, Field(ge=1)] = FOLLOWED_LOGS.default
    """Logs that are tailed at the same time, which are streams too; each holds a connection to Ray."""
    max_followed_logs_of_tenant: Annotated[int, Field(ge=1)] = FOLLOWED_LOGS_OF_TENANT.default
    max_followed_logs_of_key: Annotated[int, Field(ge=1)] = FOLLOWED_LOGS_OF_KEY.default
    max_connections: Annotated[int, Field(ge=1)] = CONNECTIONS.default
    """Maximum open connections, and at most half of the files that the process may open. One more closes the connection
    that has been idle for longest, or is closed itself if all others have a request. A client address may have half."""
    request_head_timeout_s: Annotated[float, Field(gt=0.0)] = HEAD_SECONDS.default
    """Seconds that a connection may be open without a complete request head."""
    max_file_bytes: Annotated[int, Field(ge=1024)] = FILE_BYTES.default
    """Maximum bytes of an uploaded file; the tenants file may allow less. Uploads pass through the temporary
    directory."""
    max_file_rows: Annotated[int, Field(ge=1)] = FILE_ROWS.default
    """Maximum rows of an uploaded file; the tenants file may allow less."""
    max_import_bytes: Annotated[int, Field(ge=1024)] = IMPORT_BYTES.default
    """Maximum bytes of an imported model, for any tenant."""
    max_log_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30)] = 16 << 20
    """Bytes kept of the log of an attempt that has ended, half from its beginning and half from its end, with a line
    between that says what is left out. Saving one takes up to 1.5 times as much in temporary files."""
    sweep_interval_s: Annotated[float, Field(gt=0.0)] = 3600.0
    """Seconds between two rounds of the sweeper, which deletes what is older than the settings below. In each of them 0
    keeps it for ever. Anything deployed, promoted, resumable or read by a job that has not ended is kept anyway."""
    retention_events_days: Days = 30.0
    """Days from a job's end until its events are deleted from the database; its changes of status stay."""
    retention_metrics_days: Days = 30.0
    """Days from a job's end until its time series is thinned out to `retention_metric_points`."""
    retention_metric_points: Annotated[int, Field(ge=2)] = 500
    """Points that are left of the time series of an old job."""
    retention_event_objects_days: Days = 1.0
    """Days from a job's end until its event objects, which are in the database by then, are deleted from the store."""
    retention_prepared_data_days: Days = 1.0
    """Days from a job's end until prepared rows, starts and answers that it did not delete itself are deleted."""
    retention_checkpoints_days: Days = 7.0
    """Days from a job's end until its checkpoints are deleted; a paused job has not ended."""
    retention_logs_days: Days = 90.0
    """Days from a job's end until its attempts' logs are deleted."""
    retention_tracking_days: Days = 30.0
    """Days from a job's end until the files of its offline W&B runs are deleted."""
    retention_deliveries_days: Days = 30.0
    """Days that a webhook's delivery is kept after it has been delivered or given up."""
    retention_idempotency_keys_days: Days = 30.0
    """Days for which an `Idempotency-Key` returns its job."""
    retention_promotions_days: Days = 365.0
    """Days of an alias's history; its `retention_rollbacks` newest models stay at any age."""
    retention_rollbacks: Annotated[int, Field(ge=1)] = 5
    """Models that an alias can be rolled back to, including the present one; they are kept from deletion."""
    retention_audit_days: Days = 365.0
    """Days that an entry of the audit trail is kept."""
    retention_models_days: Days = 0.0
    """Days from the arrival of a newer model of the same name until an unused model is deleted."""
    retention_jobs_days: Days = 365.0
    """Days from a job's end until its record and everything it has left are deleted; a job with a model stays."""
    requests_per_minute: Annotated[int, Field(ge=1)] = REQUESTS_PER_MINUTE.default
    """Requests per minute of one API key at one control plane; a tenth of them may come at once, more get 429."""
    session_lifetime_s: Annotated[int, Field(ge=60, le=30 * 86400)] = 12 * 3600
    """Seconds from a sign-in to the dashboard to the end of that session."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks (`10.0.0.0/8`) whose `X-Forwarded-Proto` and `X-Forwarded-For` are trusted: they decide
    whether cookies are `Secure` and which address a sign-in counts for. A client inside them can name any address."""
    allowed_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")
    """Host header values accepted while no API key is configured (against DNS rebinding by web pages). Deployments
    without keys accept these, addresses, and local names."""

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'swiftkv.db'}"

    @property
    def resolved_serve_dashboard_url(self) -> str:
        return self.serve_dashboard_url or self.ray_dashboard_url

    @property
    def requires_credentials(self) -> bool:
        """Whether callers need a key or a token; else all of them are one local tenant."""
        return self.api_keys_file is not None or self.oidc_file is not None

    @property
    def resolved_source_roots(self) -> tuple[str, ...] | None:
        return () if self.source_roots is None and self.requires_credentials else self.source_roots

    @property
    def resolved_deployments_share(self) -> float:
        is_shared = self.requires_credentials and self.serve_dashboard_url is None
        return self.deployments_share or (0.5 if is_shared else 1.0)

    @property
    def resolved_storage_uri(self) -> str:
        return self.storage_uri or str(self.home / "store")
