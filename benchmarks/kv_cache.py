"""The cache of `generate()` in bfloat16 and in 8 bits, of the built-in teacher and a student: bytes a token and KL.

    python -m benchmarks.kv_cache [--output kv_cache.json] [--num-key-value-layers 6 --key-value-group-size 2]

KL is the mean over positions of KL(unquantised cache || quantised cache), in nats, of modules of the standard library
that the teacher was not trained on; float32 arithmetic, so that nothing but the cache is rounded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import swiftkv_platform.sources
from benchmarks.reports import benchmark_parser, write_report
from swiftkv_platform.model import convert
from swiftkv_platform.model.cache import cache_bytes, make_cache
from swiftkv_platform.sources.corpus import standard_library_modules

TEACHER = Path(swiftkv_platform.sources.__file__).parent / "teacher"
ROW_LENGTH = 512


def held_out_rows(num_rows: int) -> torch.Tensor:
    """[num_rows, ROW_LENGTH] tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    token_ids: list[int] = []
    for module in standard_library_modules():
        if module.held_out:
            token_ids += tokenizer(module.text)["input_ids"]
        if len(token_ids) >= num_rows * ROW_LENGTH:
            break
    return torch.tensor(token_ids[: num_rows * ROW_LENGTH]).view(num_rows, ROW_LENGTH)


@torch.no_grad()
def measure(model: Any, rows: torch.Tensor, kv_cache_dtype: str, *, swiftkv: bool) -> dict[str, object]:
    model.swiftkv(swiftkv)
    exact = model(rows, use_cache=False).logits.log_softmax(-1)
    cache = make_cache(model.config, swiftkv=swiftkv, kv_cache_dtype=kv_cache_dtype)
    actual = model(rows, past_key_values=cache).logits.log_softmax(-1)
    num_bytes = cache_bytes(cache) / rows.numel()
    return {
        "mode": "student" if swiftkv else "teacher",
        "kv_cache_dtype": "bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype,
        "num_kv_cache_layers": len(cache.layers),
        # Computed in float32; a bfloat16 model would store half of that.
        "kv_bytes_per_token": num_bytes / 2 if kv_cache_dtype == "auto" else num_bytes,
        "kl": float((exact.exp() * (exact - actual)).sum(-1).mean()),
        "top1_agreement": float((exact.argmax(-1) == actual.argmax(-1)).float().mean()),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--num-key-value-layers", type=int, default=6)
    parser.add_argument("--key-value-group-size", type=int, default=2)
    args = parser.parse_args()
    model = convert(
        TEACHER,
        num_key_value_layers=args.num_key_value_layers,
        key_value_group_size=args.key_value_group_size,
    ).float()
    rows = held_out_rows(args.rows)
    results = [
        measure(model, rows, kv_cache_dtype, swiftkv=swiftkv)
        for swiftkv in (False, True)
        for kv_cache_dtype in ("auto", "fp8", "int8")
    ]
    for result in results:
        print(json.dumps(result))
    write_report(results, args.output)


if __name__ == "__main__":
    main()
