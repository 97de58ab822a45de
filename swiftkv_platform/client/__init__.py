"""Typed, synchronous HTTP client of the control plane and `/generate`. Imports neither torch nor server code."""

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
from swiftkv_platform.client.models import Generation, Job, JobEvent, Resource

__all__ = [
    "APIError",
    "AuthenticationError",
    "Client",
    "FieldError",
    "Generation",
    "InvalidRequestError",
    "Job",
    "JobEvent",
    "RateLimitedError",
    "RequestConflictError",
    "Resource",
    "ResourceNotFoundError",
    "ServerError",
    "ServiceUnavailableError",
    "UnreachableError",
    "WaitTimeoutError",
]
