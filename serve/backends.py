"""Choice of a replica's engine: this project's own, or vLLM. Pure functions; they load nothing and import no engine."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv_platform.specs.engine import Backend, EngineConfig
from swiftkv_platform.vllm.families import FAMILIES


@dataclass(frozen=True)
class Surroundings:
    """Facts, beside the engine options, that decide which engine can run a version."""

    device: str
    """`cpu` or `cuda`: the device that the version is to run on."""
    has_vllm: bool
    """Whether the replica's environment has vLLM."""
    model_type: str
    """Model type in the artifact's `config.json`."""
    has_exit_head: bool
    """Whether requests may ask for an early exit."""
    has_own_head_count: bool = False
    """Whether the student's shared layers have another number of key-value heads than its teacher's."""
    is_judged: bool = False
    """Whether a shadow reads its distributions, or judges by them."""


def choose_backend(config: EngineConfig, around: Surroundings) -> Backend:
    """The engine for a version. `auto` is vLLM on a GPU where nothing is lost by it; what is named is taken as it is,
    and refused where it is loaded if it cannot serve the model."""
    if config.backend != "auto":
        return config.backend
    suits_vllm = (
        around.device == "cuda"
        and around.has_vllm
        and around.model_type.removesuffix("_swiftkv") in FAMILIES
        and not around.has_exit_head
        and not around.has_own_head_count
        and not around.is_judged
        and not config.native_only
    )
    return "vllm" if suits_vllm else "native"
