"""HTTP client of the control plane and `/generate`: typed, synchronous, torch-free. Knows the wire, no server code."""

from swiftkv_platform.client.client import Client
from swiftkv_platform.client.errors import (
    APIError,
    AuthenticationError,
    FieldError,
    InvalidRequestError,
    RateLimitedError,
    RequestConflictError,
    ResourceNotFoundError,
    ServerError,
    ServiceUnavailableError,
    UnreachableError,
    WaitTimeoutError,
)
from swiftkv_platform.client.models import (
    ArtifactFile,
    Deployment,
    Estimate,
    Generation,
    GenerationChoice,
    Job,
    JobEvent,
    JobProgress,
    MetricPoint,
    Model,
)

__all__ = [
    "APIError",
    "ArtifactFile",
    "AuthenticationError",
    "Client",
    "Deployment",
    "Estimate",
    "FieldError",
    "Generation",
    "GenerationChoice",
    "InvalidRequestError",
    "Job",
    "JobEvent",
    "JobProgress",
    "MetricPoint",
    "Model",
    "RateLimitedError",
    "RequestConflictError",
    "ResourceNotFoundError",
    "ServerError",
    "ServiceUnavailableError",
    "UnreachableError",
    "WaitTimeoutError",
]
