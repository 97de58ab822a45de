"""Parsing of model and data names, and the rules on which of them a tenant's specs may read.

The rules, the control plane's checks and the workers' readers share these types, so that all parse a name alike.
"""

from __future__ import annotations

from swiftkv_platform.sources.names import (
    NO_RULES,
    UNRESTRICTED,
    Access,
    BuiltinSource,
    FileSource,
    HubSource,
    PathSource,
    S3Source,
    Source,
    SourceRules,
    TrafficSource,
    parse_location,
    parse_source,
)
from swiftkv_platform.sources.untrusted_files import UNBOUNDED, Boundary

__all__ = [
    "NO_RULES",
    "UNBOUNDED",
    "UNRESTRICTED",
    "Access",
    "Boundary",
    "BuiltinSource",
    "FileSource",
    "HubSource",
    "PathSource",
    "S3Source",
    "Source",
    "SourceRules",
    "TrafficSource",
    "parse_location",
    "parse_source",
]
