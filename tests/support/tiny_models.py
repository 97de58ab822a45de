"""Random teachers small enough for tests."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.support.fakes.tokenizers import byte_tokenizer

SHAPE = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
WINDOW = 16
MIXED = [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "sliding")]
TOKEN = {"vocab_size": 259}
"""transformers' Qwen2 tokenizer class adds a token."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"num_key_value_heads": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
YARN |= {"mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
OLMO_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
OLMO_YARN |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
MULTIPLIERS |= {"residual_multiplier": 0.5, "logits_scaling": 2.0}
GROUP_LIMITED = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0}

FAMILY_CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "mistral-full": MistralConfig(**SHAPE, sliding_window=None),
    "ministral": MinistralConfig(**SHAPE, head_dim=16, sliding_window=WINDOW, layer_types=MIXED),
    "qwen2": Qwen2Config(**SHAPE | TOKEN),
    "qwen2-mixed": Qwen2Config(
        **SHAPE | TOKEN,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=MIXED,
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "granite": GraniteConfig(**SHAPE, **MULTIPLIERS, tie_word_embeddings=True),
    "seed_oss": SeedOssConfig(**SHAPE, head_dim=16),
    "smollm3": SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1, 0, 0], pad_token_id=None),
    "olmo2": Olmo2Config(**SHAPE, pad_token_id=None),
    "olmo3": Olmo3Config(
        **SHAPE,
        pad_token_id=None,
        sliding_window=WINDOW,
        layer_types=MIXED,
        rope_parameters={
            "full_attention": OLMO_YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "phi3": Phi3Config(**SHAPE, pad_token_id=None, sliding_window=WINDOW),
    "phi3-partial": Phi3Config(
        **SHAPE,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "gemma3_text": Gemma3TextConfig(
        **SHAPE,
        pad_token_id=None,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=MIXED,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, num_experts=4, mlp_only_layers=[1]),
    "deepseek_v2": DeepseekV2Config(**SHAPE | LATENT | EXPERTS, q_lora_rank=None),
    "deepseek_v2-lora": DeepseekV2Config(
        **SHAPE | LATENT | EXPERTS | GROUP_LIMITED, q_lora_rank=20, attention_bias=True, rope_parameters=YARN
    ),
}
"""Every row of the family table, by `model_type`; variants within a family have a suffix after a dash."""
CONFIGS: dict[str, PreTrainedConfig] = FAMILY_CONFIGS | {
    "llama-biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=16),
    "mixtral-sliding": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
    "qwen3_moe-sparse": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, decoder_sparse_step=2),
}
"""`FAMILY_CONFIGS`, and other shapes that a family's checkpoints may have."""


def random_tokens(*shape: int, seed: int = 7) -> torch.Tensor:
    """Return token ids of `SHAPE`'s vocabulary, the same for the same arguments."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def family_teacher(name: str, seed: int = 3, **changes: Any) -> PreTrainedModel:
    """Return a random float32 teacher of `CONFIGS` with `changes` to its config; its norms are not ones and its biases
    not zeros."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    for field, value in changes.items():
        setattr(config, field, value)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None  # random weights may emit it at any step
    return model


def disturb(student: Any) -> Any:
    """Move the SwiftKV weights away from the teacher's, so that confusing them is noticed."""
    with torch.no_grad():
        for parameter in student.swiftkv_parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return student


def teacher_config(**overrides: Any) -> LlamaConfig:
    return LlamaConfig(**(SHAPE | {"num_hidden_layers": 6} | overrides))


def random_teacher(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Return a float32 Llama with random weights, norms and biases, wide enough that every layer matters."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(teacher_config(**overrides)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_teacher(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    random_teacher(seed, **overrides).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
