"""Entry point that vLLM calls at start: registers configurations, model classes and load-time checks by name.

vLLM calls it in each of its processes, some of them more than once. A vLLM of an unknown version keeps serving other
models: the refusal comes when a SwiftKV model is loaded.
"""

from __future__ import annotations


def register() -> None:
    """Make vLLM read, check and serve SwiftKV directories; calling it again changes nothing. Raises `ModelError`: a
    vLLM of an unknown version that lacks what the plugin registers with."""
    import vllm

    from swiftkv_platform import configs
    from swiftkv_platform.vllm.families import FAMILIES, UNSERVED, architecture
    from swiftkv_platform.vllm.frontend import follow_frontend
    from swiftkv_platform.vllm.versions import check_version

    follow_frontend()
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from swiftkv_platform.vllm.checks import SwiftKVChecks
    except ImportError:
        check_version(vllm.__version__)
        raise
    configs.register()
    for model_type in (*FAMILIES, *UNSERVED):
        name = architecture(model_type)
        ModelRegistry.register_model(name, f"swiftkv_platform.vllm.causal_lm:{name}")
        MODELS_CONFIG_MAP[name] = SwiftKVChecks
