"""The process environment as one frozen object. Every variable is `SWIFTKV_<FIELD>`; credentials of S3, W&B and the hub
keep the names their own libraries read (`AWS_*`, `WANDB_API_KEY`, `HF_TOKEN`) and never pass through here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from swiftkv_platform.frozen import FrozenModel


def default_home() -> Path:
    """`~/.swiftkv`: databases, stores, logs and pids of a machine without configuration."""
    return Path.home() / ".swiftkv"


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

    home: Path = Field(default_factory=default_home)
    """Directory of everything that has no address of its own."""
    database_url: str | None = None
    """SQLAlchemy URL; None is SQLite at `{home}/swiftkv.db`."""
    database_connect_timeout_s: Annotated[int, Field(ge=2, le=600)] = 10
    """Seconds until a connection to PostgreSQL is made; SQLite knows neither this nor the three that follow."""
    database_statement_timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] = 30.0
    """Seconds for the answer to one statement, those of migrations aside. Ten more, and the control plane gives up the
    connection itself."""
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
    """Address of the serve API where deployments have a Ray cluster of their own; None: of the same as jobs."""
    entrypoint_num_cpus: Annotated[float, Field(ge=0.0)] = 0.0
    """CPUs that Ray reserves for the driver of each job. With 0 here and for memory, drivers run on Ray's head and take
    none of its reservations, which keeps a machine of two cores to the workers; else on any node with room."""
    entrypoint_memory: Annotated[int, Field(ge=0)] = 0
    """Bytes that Ray reserves for the driver of each job, as the CPUs; a driver takes some 400 MB."""
    node_groups: dict[str, NodeGroup] = {}
    """Groups of nodes that Ray's autoscaler v2 adds, by name, as JSON:
    `{"gpu": {"max_nodes": 8, "resources": {"CPU": 8, "GPU": 1}}}`. Jobs then wait in the queue for what these groups
    and the nodes there are cannot hold now, and are refused if those never could. Ray does not tell them: without this
    setting a job of a cluster that grows starts at once and waits in its attempt."""
    serve_url: str = "http://127.0.0.1:8001"
    """Address of Ray Serve's HTTP proxy."""
    source_roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes that specs may read, `{tenant}` standing for the caller's; the hub and built-in
    sources are always open. None opens everything, or nothing else where callers show keys or tokens."""
    publish_targets: tuple[str, ...] = ()
    """Places that jobs may publish models to, `{tenant}` standing for the caller's: `hf://organization`,
    `s3://bucket/prefix`, directories. None by default: the workers write there with their own credentials."""
    allow_code_tasks: bool = False
    """Let tasks of an evaluation run text as code, such as what a model writes (HumanEval, MBPP, tasks that hand
    answers to sympy) or a metric of the hub, on the workers and with what they may reach."""
    model_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of models that a machine keeps for its replicas, at `{home}/models`; read where replicas run. With 0 each
    replica, and each swap, fetches its model again."""
    host: str = "127.0.0.1"
    """Address the control plane listens on; without API keys only loopback is allowed."""
    api_keys_file: Path | None = None
    """File of hashed API keys (`swiftkv keys create` writes it); None accepts every request from this machine."""
    serve_api_keys_file: Path | None = None
    """The same file, or another of its kind, where Ray's nodes see it: deployments then answer the keys of their tenant
    that have the scope `generate`. None: deployments answer every request that reaches `serve_url`."""
    oidc_file: Path | None = None
    """YAML file of OpenID Connect issuers whose bearer tokens are accepted beside the keys (docs/operations.md)."""
    serve_oidc_file: Path | None = None
    """The same file, or another of its kind, where Ray's nodes see it: deployments then answer tokens as well."""
    tenants_file: Path | None = None
    """YAML file of quotas and weights (docs/operations.md); None sets no limits."""
    gpu_hour_price: Annotated[float, Field(ge=0.0)] | None = None
    """Price of a GPU for an hour; without prices jobs have no cost and `limits.cost_cap` is refused."""
    cpu_hour_price: Annotated[float, Field(ge=0.0)] | None = None
    """Price of a CPU core for an hour."""
    flops_per_second: Annotated[float, Field(gt=0.0)] | None = None
    """FLOPs a second that one worker reaches, for the time estimate while no job like it has been measured."""
    node_gpus: Annotated[int, Field(ge=1)] = 8
    """GPUs of a node, for the plan of a job's disk, downloads and time, as the five that follow."""
    node_cpus: Annotated[float, Field(gt=0.0)] | None = None
    """CPUs of a node; None plans all workers without GPUs on one."""
    node_disk_bytes: Annotated[int, Field(ge=1)] | None = None
    """Bytes that a job may take on the disk of a node; one that needs more is refused. None: not known."""
    hub_bytes_per_second: Annotated[float, Field(gt=0.0)] = 100e6
    """Rate at which a node reads from the hub."""
    store_bytes_per_second: Annotated[float, Field(gt=0.0)] = 500e6
    """Rate at which a node reads from the object store, or writes to it."""
    disk_bytes_per_second: Annotated[float, Field(gt=0.0)] = 1e9
    """Rate at which a node reads its disk, or writes to it."""
    webhook_origins: tuple[str, ...] = ()
    """Origins open to webhooks: `https://host`, `https://*.domain`, `http://host:port`; none: they are refused."""
    secrets_dir: Path | None = None
    """Directory of named secrets, one file `{tenant}/{name}` each: what webhooks are signed with."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    reconcile_interval_s: Annotated[float, Field(gt=0.0)] = 1.0
    """Pause between two rounds of the reconciler."""
    max_running_jobs: Annotated[int, Field(ge=1)] = 1
    """Jobs submitted to Ray at the same time, of all tenants; the rest wait in the queue."""
    max_deployment_replicas: Annotated[int, Field(ge=1)] = 64
    """Most replicas of one deployment; what a tenant's deployments hold together is its quota's to bound."""
    deployments_share: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the cluster's CPUs and GPUs that the replicas of all deployments may have, each rounded up; the rest is
    for jobs. None: half where callers show keys or tokens, else all, as of a cluster for deployments alone."""
    placement_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """Seconds that an attempt that has not trained may hold its slot while its workers find no place; then the job is
    queued again, and uses no retry."""
    turn_s: Annotated[float, Field(gt=0.0)] | None = 14_400.0
    """Seconds that an attempt may hold its slot while another tenant's job waits for it; then it checkpoints, and the
    job is queued again, and uses no retry. One that does not train has twice as long with each attempt. None: no
    limit."""
    max_runtime_s: Annotated[int, Field(ge=1)] | None = None
    """The longest that an attempt may run; `limits.max_runtime_s` may ask for less. None leaves it to specs."""
    max_workers_per_job: Annotated[int, Field(ge=1)] = 1024
    """Workers that a job may ask for, over all trials of a sweep that run at a time."""
    max_batch_size: Annotated[int, Field(ge=1)] = 65536
    """`training.batch_size`, and rows of one worker's pass, that a job may ask for."""
    max_request_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    """A larger body is answered with 413."""
    max_body_bytes_at_once: Annotated[int, Field(ge=1024)] = 32 << 20
    """Bytes of bodies that are read, or whose requests are not answered yet, at a time; a tenant has a quarter, a key
    an eighth, and more of them are answered with 429. Uploads of files have places of their own."""
    max_streams: Annotated[int, Field(ge=1)] = 512
    """Answers that go on for long at a time: event streams, logs, files, answers of deployments; more get 429."""
    max_streams_of_tenant: Annotated[int, Field(ge=1)] = 128
    max_streams_of_key: Annotated[int, Field(ge=1)] = 64
    max_followed_logs: Annotated[int, Field(ge=1)] = 64
    """Logs that are followed at a time, which are streams too; each holds a connection to Ray."""
    max_followed_logs_of_tenant: Annotated[int, Field(ge=1)] = 32
    max_followed_logs_of_key: Annotated[int, Field(ge=1)] = 16
    max_connections: Annotated[int, Field(ge=1)] = 4096
    """Connections at a time, and not more than half of the files that the process may open. One too many takes the
    place of the one that has been without a request for longest; where all others have one, it is closed."""
    request_head_timeout_s: Annotated[float, Field(gt=0.0)] = 10.0
    """Seconds that a connection may be open without the whole head of a request."""
    max_file_bytes: Annotated[int, Field(ge=1024)] = 512 << 20
    """Bytes of one uploaded file; the tenants file may allow less. Uploads pass through the temporary directory."""
    max_file_rows: Annotated[int, Field(ge=1)] = 1_000_000
    """Rows of one uploaded file; the tenants file may allow less."""
    max_log_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 30)] = 16 << 20
    """Kept of the log of an attempt that has ended: its first and its last half, with a line between that says what is
    left out. While one is saved, temporary files take up to one and a half times as much."""
    sweep_interval_s: Annotated[float, Field(gt=0.0)] = 3600.0
    """Pause between two rounds of the sweeper, which removes what the settings below keep no longer; in all of them 0
    keeps it for ever, and what is deployed, promoted, resumable or read by a job that has not ended stays anyway."""
    retention_events_days: Days = 30.0
    """Days from a job's end to that of its events in the database; those of its changes of status stay."""
    retention_metrics_days: Days = 30.0
    """Days from a job's end until its time series is thinned out to `retention_metric_points`."""
    retention_metric_points: Annotated[int, Field(ge=2)] = 500
    """Points that are left of the time series of an old job."""
    retention_event_objects_days: Days = 1.0
    """Days from a job's end to that of its event objects in the store, all of which the database has read."""
    retention_prepared_data_days: Days = 1.0
    """Days from a job's end to that of prepared rows, starts and answers that its own end has left behind."""
    retention_checkpoints_days: Days = 7.0
    """Days from a job's end to that of its checkpoints; a paused job has not ended."""
    retention_logs_days: Days = 90.0
    """Days from a job's end to that of its attempts' logs."""
    retention_tracking_days: Days = 30.0
    """Days from a job's end to that of W&B's files of offline runs."""
    retention_deliveries_days: Days = 30.0
    """Days that a webhook's delivery is kept once it has been delivered or given up."""
    retention_idempotency_keys_days: Days = 30.0
    """Days that an `Idempotency-Key` stands for its job."""
    retention_promotions_days: Days = 365.0
    """Days of an alias's history, of which the `retention_rollbacks` newest models stay however old they are."""
    retention_rollbacks: Annotated[int, Field(ge=1)] = 5
    """Models that an alias can always stand for, the present one included; they are held back from deletion."""
    retention_audit_days: Days = 365.0
    """Days that an entry of the audit trail is kept."""
    retention_models_days: Days = 0.0
    """Days from when a newer model of the same name came to the deletion of one that nothing holds."""
    retention_jobs_days: Days = 365.0
    """Days from a job's end to the deletion of its record and of all that it has left; one with a model stays."""
    requests_per_minute: Annotated[int, Field(ge=1)] = 3000
    """Requests of one API key, at one control plane; a tenth of them may come at once, more are answered with 429."""
    session_lifetime_s: Annotated[int, Field(ge=60, le=30 * 86400)] = 12 * 3600
    """Seconds from a sign-in to the dashboard to the end of that session."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks (`10.0.0.0/8`) whose `X-Forwarded-Proto` and `X-Forwarded-For` are believed: cookies are
    `Secure` and sign-ins are counted by the address that they name. Who connects from one of them may name any."""
    allowed_hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")
    """Host header values accepted while no API key is configured (a web page must not reach the API by rebinding).
    Deployments without keys accept these, addresses, and local names."""

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'swiftkv.db'}"

    @property
    def resolved_serve_dashboard_url(self) -> str:
        return self.serve_dashboard_url or self.ray_dashboard_url

    @property
    def knows_callers(self) -> bool:
        """Whether callers show a key or a token; else all of them are one local tenant."""
        return self.api_keys_file is not None or self.oidc_file is not None

    @property
    def resolved_source_roots(self) -> tuple[str, ...] | None:
        return () if self.source_roots is None and self.knows_callers else self.source_roots

    @property
    def resolved_deployments_share(self) -> float:
        is_shared = self.knows_callers and self.serve_dashboard_url is None
        return self.deployments_share or (0.5 if is_shared else 1.0)

    @property
    def resolved_storage_uri(self) -> str:
        return self.storage_uri or str(self.home / "store")
