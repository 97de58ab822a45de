"""Plain `config.json` contents, for tests that read no weights."""

from typing import Any


def llama_config(num_hidden_layers: int, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 512,
        **changes,
    }
