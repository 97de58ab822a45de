"""FLOPs, KV bytes, memory and time of SwiftKV models from `config.json` alone. Imports no torch; runs in any image."""

from swiftkv_platform.planning.architecture import Architecture, read_architecture
from swiftkv_platform.planning.config import check_generation_values, has_quantized_weights, read_config
from swiftkv_platform.planning.prefill import Components, Plan, PrefillComparison, plan
from swiftkv_platform.planning.serving import ServingPlan, ServingSetup, plan_serving
from swiftkv_platform.planning.training import TrainingPlan, TrainingSetup, plan_training
from swiftkv_platform.student_shape import equal_cache_group_size

__all__ = [
    "Architecture",
    "Components",
    "Plan",
    "PrefillComparison",
    "ServingPlan",
    "ServingSetup",
    "TrainingPlan",
    "TrainingSetup",
    "check_generation_values",
    "equal_cache_group_size",
    "has_quantized_weights",
    "plan",
    "plan_serving",
    "plan_training",
    "read_architecture",
    "read_config",
]
