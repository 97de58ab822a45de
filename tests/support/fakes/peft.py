"""PEFT LoRA adapters as `peft` 0.21 saves them, and the outputs of a model with one: a second implementation, by hooks
beside unchanged weights."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "peft_version": "0.21.2",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "inference_mode": True,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "loftq_config": {},
    "layer_replication": None,
    "target_parameters": None,
    "revision": None,
}
"""Content of an `adapter_config.json`, without the name of the base model."""


def save_adapter(
    model: PreTrainedModel,
    directory: Path,
    base: str | Path,
    *,
    targets: tuple[str, ...] = ("q_proj", "down_proj"),
    saved: Mapping[str, torch.Tensor] = {},
    ranks: Mapping[str, int] = {},
    **config: Any,
) -> dict[str, torch.Tensor]:
    """Write an adapter of random matrices for the modules of `model` whose names end in `targets`, and return its
    tensors. `saved`: whole tensors to store; `ranks`: by module, if not r."""
    torch.manual_seed(5)
    values = {**CONFIG, "base_model_name_or_path": str(base), **config}
    tensors = {f"base_model.model.{name}": tensor.clone() for name, tensor in saved.items()}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        rows, columns = module.weight.shape
        rank, stem = ranks.get(name, values["r"]), f"base_model.model.{name}"
        if isinstance(module, nn.Embedding):
            tensors[f"{stem}.lora_embedding_A"] = torch.randn(rank, rows) * 0.1
            tensors[f"{stem}.lora_embedding_B"] = torch.randn(columns, rank) * 0.1
            continue
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, columns) * 0.1
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, rank) * 0.1
        if values["use_dora"]:
            tensors[f"{stem}.lora_magnitude_vector"] = torch.rand(rows) + 0.5
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return tensors


def run_with_adapter(
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor,
    *,
    alpha: Mapping[str, float] = {},
    is_rank_stabilized: bool = False,
) -> torch.Tensor:
    """Return the logits of `model` with an adapter's low-rank matrices beside its weights. `alpha`: by module, if not
    8."""
    hooks = []
    for name, module in model.named_modules():
        own = {
            key.removeprefix(f"base_model.model.{name}.").removesuffix(".weight"): tensor
            for key, tensor in tensors.items()
            if key.startswith(f"base_model.model.{name}.lora_")
        }
        if not own:
            continue
        rank = next(iter(own.values())).shape[0]
        scale = alpha.get(name, 8) / (math.sqrt(rank) if is_rank_stabilized else rank)

        def change(module: Any, args: Any, output: torch.Tensor, own: Any = own, scale: float = scale) -> torch.Tensor:
            if "lora_embedding_A" in own:
                return output + scale * own["lora_embedding_A"].T[args[0]] @ own["lora_embedding_B"].T
            added = scale * (args[0] @ own["lora_A"].T) @ own["lora_B"].T
            if (magnitude := own.get("lora_magnitude_vector")) is None:
                return output + added
            norms = (module.weight + scale * own["lora_B"] @ own["lora_A"]).square().sum(1).sqrt()
            bias = 0 if module.bias is None else module.bias
            return (output - bias + added) * (magnitude / norms) + bias

        hooks.append(module.register_forward_hook(change))
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(token_ids).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits
