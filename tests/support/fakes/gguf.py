"""Write models as GGUF files, with the tensor names and order of llama.cpp's converter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import PreTrainedModel

from tests.support.fakes.tokenizers import BOS, EOS, byte_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def save_gguf(model: PreTrainedModel, path: Path, *, chat_template: str | None = None, **values: str) -> Path:
    """Write a Llama, Qwen2, Qwen3 or Gemma 3 with the byte tokenizer, in float32.

    Args:
        values: more string values of the header, with `__` for a dot.
    """
    config = model.config
    gemma = config.model_type == "gemma3_text"
    writer = GGUFWriter(path, "gemma3" if gemma else config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if gemma:
        writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(model.model.layers[0].self_attn.head_dim)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    for name, text in values.items():
        writer.add_string(name.replace("__", "."), text)
    _add_tokenizer(writer, chat_template, config.vocab_size)
    for name, tensor in model.state_dict().items():
        if not (config.tie_word_embeddings and name.startswith("lm_head")):
            offset = 1 if gemma and name.endswith("norm.weight") else 0
            named = _gguf_name(name, _NAMES | _GEMMA_NAMES if gemma else _NAMES)
            writer.add_tensor(named, _rotated_as_llama_cpp(config, name, tensor + offset))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, chat_template: str | None, size: int) -> None:
    vocabulary = byte_tokenizer().get_vocab()
    # transformers adds missing tokens: `<|endoftext|>` to such vocabularies, `<mask>` to Gemma's.
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__)[:-1], "<|endoftext|>"]
    tokens += ["<mask>", *(f"<unused{i}>" for i in range(size))][: size - len(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "<|endoftext|>") else 1 for token in tokens])
    writer.add_token_scores([0.0] * len(tokens))  # no merges
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(EOS)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _gguf_name(name: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def _rotated_as_llama_cpp(config: Any, name: str, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Reorder a Llama's query and key rows: llama.cpp rotates neighbouring dimensions, transformers halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is not None and config.model_type == "llama":
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor.float().numpy()
