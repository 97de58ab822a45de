"""The recipes that ship with the package, and the shapes of their teachers."""

from collections.abc import Mapping
from typing import Any

from swiftkv_platform.sources.recipes import find_recipes
from swiftkv_platform.sources.teacher_config import find_builtin_teacher, read_config_file
from swiftkv_platform.specs import BUILTIN_TEACHER, REAL_TEACHER, JobSpec

RECIPES = list(find_recipes().values())

TEACHERS = {
    REAL_TEACHER: {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-3.1-405B-Instruct-FP8": {
        "model_type": "llama", "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248,
        "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "fbgemm_fp8"},
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        "model_type": "llama", "num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 8192,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "mistralai/Mistral-Small-Instruct-2409": {
        "model_type": "mistral", "num_hidden_layers": 56, "hidden_size": 6144, "intermediate_size": 16384,
        "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 32768,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
    },
    "deepseek-ai/DeepSeek-V2-Lite-Chat": {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 163840,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
}  # fmt: skip
"""Shape of each teacher, from its public `config.json`."""


def teacher_config(spec: JobSpec) -> dict[str, Any]:
    """Return the `config.json` of a recipe's teacher."""
    name = spec.model.name_or_path
    return read_config_file(find_builtin_teacher(name)) if name == BUILTIN_TEACHER else dict(TEACHERS[name])


def device_peak(spec: JobSpec, train: Mapping[str, int]) -> int:
    """Return the bytes on a worker's device at the peak of a dry run's training step, `Memory` as JSON.

    A dry run does not tell host memory apart, in which offloaded weights and optimizer state are.
    """
    return train["passing"] if spec.sharding.cpu_offload else train["peak"]
