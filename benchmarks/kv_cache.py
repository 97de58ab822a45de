"""The cache of `generate()` in bfloat16 and in 8 bits, of the built-in teacher and a student: bytes a token and KL
(the paper's table 7).

    python -m benchmarks.kv_cache [STUDENT] [--output kv_cache.json]
                                  [--num-key-value-layers 6 --key-value-group-size 2]

STUDENT is the directory of a student of the built-in teacher that carries its teacher, as a job's artifact does; left
out, it is an untrained one. `kl` is the mean over positions of KL(unquantised cache || quantised cache), in nats, and
`kl_to_teacher` that of KL(teacher, unquantised || this mode and cache), of modules of the standard library that the
teacher was not trained on; float32 arithmetic, so that nothing but the cache is rounded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def kl(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """Mean KL(exact || actual) over positions, in nats, of log-probabilities [rows, tokens, vocab]."""
    return float((exact.exp() * (exact - actual)).sum(-1).mean())


@torch.no_grad()
def log_probabilities(model: Any, rows: torch.Tensor, *, swiftkv: bool) -> torch.Tensor:
    """Log-probabilities [rows, tokens, vocab] of a mode without a cache."""
    logits: torch.Tensor = model.swiftkv(swiftkv)(rows, use_cache=False).logits
    return logits.log_softmax(-1)


@torch.no_grad()
def measure(
    model: Any, rows: torch.Tensor, teacher: torch.Tensor, kv_cache_dtype: str, *, swiftkv: bool
) -> dict[str, object]:
    """A mode with a cache.

    Args:
        teacher: the teacher's log-probabilities.
    """
    exact = log_probabilities(model, rows, swiftkv=swiftkv) if swiftkv else teacher
    model.swiftkv(swiftkv)
    cache = make_cache(model.config, swiftkv=swiftkv, kv_cache_dtype=kv_cache_dtype)
    actual = model(rows, past_key_values=cache).logits.log_softmax(-1)
    num_bytes = cache_bytes(cache) / rows.numel()
    return {
        "mode": "student" if swiftkv else "teacher",
        "kv_cache_dtype": "bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype,
        "num_kv_cache_layers": len(cache.layers),
        # Computed in float32; a bfloat16 model would store half of that.
        "kv_bytes_per_token": num_bytes / 2 if kv_cache_dtype == "auto" else num_bytes,
        "kl": kl(exact, actual),
        "kl_to_teacher": kl(teacher, actual),
        "top1_agreement": float((exact.argmax(-1) == actual.argmax(-1)).float().mean()),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("student", type=Path, nargs="?", help="directory; default: an untrained student")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--num-key-value-layers", type=int, default=6)
    parser.add_argument("--key-value-group-size", type=int, default=2)
    args = parser.parse_args()
    if args.student is None:
        shape = {"num_key_value_layers": args.num_key_value_layers, "key_value_group_size": args.key_value_group_size}
        model = convert(TEACHER, **shape).float()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.student, dtype=torch.float32)
    rows = held_out_rows(args.rows)
    teacher = log_probabilities(model, rows, swiftkv=False)
    results = [
        measure(model, rows, teacher, kv_cache_dtype, swiftkv=swiftkv)
        for swiftkv in (False, True)
        for kv_cache_dtype in ("auto", "fp8", "int8")
    ]
    for result in results:
        print(json.dumps(result))
    write_report(results, args.output)


if __name__ == "__main__":
    main()
