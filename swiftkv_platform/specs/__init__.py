"""The job spec and the deployment spec. Frozen, torch-free, no I/O.

Every key of the YAML or JSON spec is a field here; unknown keys are refused. Checks that need the model's configuration
(e.g. l < number of layers) are made where that configuration is read.
"""

from __future__ import annotations

from swiftkv_platform.specs.base import is_path_like
from swiftkv_platform.specs.data import (
    BUILTIN_CHATS,
    BUILTIN_CONSTRAINTS,
    BUILTIN_DATA,
    BUILTIN_LONG_RECALL,
    BUILTIN_PROMPTS,
    BUILTIN_RECALL,
    CompletionSpec,
    DataSourceSpec,
    DataSpec,
)
from swiftkv_platform.specs.evaluation import PAPER_TASKS, EvaluationSpec, RowTaskSpec, SweepSpec, TaskSpec
from swiftkv_platform.specs.job import (
    BUILTIN_TEACHER,
    REAL_TEACHER,
    CheckpointSpec,
    DistillationSpec,
    JobSpec,
    LimitsSpec,
    ModelSpec,
    PublishSpec,
    TrackingSpec,
    WandbSpec,
    load_spec,
)
from swiftkv_platform.specs.training import (
    EarlyStoppingSpec,
    ElasticSpec,
    FaultToleranceSpec,
    GuardSpec,
    OptimizerSpec,
    ResourcesSpec,
    ShardingSpec,
    SwiftKVSpec,
    TrainingSpec,
    ValidationSpec,
)

__all__ = [
    "BUILTIN_CHATS",
    "BUILTIN_CONSTRAINTS",
    "BUILTIN_DATA",
    "BUILTIN_LONG_RECALL",
    "BUILTIN_PROMPTS",
    "BUILTIN_RECALL",
    "BUILTIN_TEACHER",
    "PAPER_TASKS",
    "REAL_TEACHER",
    "CheckpointSpec",
    "CompletionSpec",
    "DataSourceSpec",
    "DataSpec",
    "DistillationSpec",
    "EarlyStoppingSpec",
    "ElasticSpec",
    "EvaluationSpec",
    "FaultToleranceSpec",
    "GuardSpec",
    "JobSpec",
    "LimitsSpec",
    "ModelSpec",
    "OptimizerSpec",
    "PublishSpec",
    "ResourcesSpec",
    "RowTaskSpec",
    "ShardingSpec",
    "SweepSpec",
    "SwiftKVSpec",
    "TaskSpec",
    "TrackingSpec",
    "TrainingSpec",
    "ValidationSpec",
    "WandbSpec",
    "is_path_like",
    "load_spec",
]
