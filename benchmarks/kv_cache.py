"""The cache of `generate()` in bfloat16 and in 8 bits: bytes a token and KL, of a student and its teacher (the paper's
table 7).

    python -m benchmarks.kv_cache [STUDENT] [--rows 8] [--output kv_cache.json]

STUDENT is the directory of a student that carries its teacher, as a job's artifact does; the default is an untrained
one of the built-in teacher, l = 6, g = 2. `kl` is the mean over positions of KL(unquantised cache || quantised cache),
in nats, `kl_margin` half of its 95% interval by row, and `kl_to_teacher` the mean of KL(teacher, unquantised || this
mode and cache), of held-out modules of the standard library; float32 arithmetic, so that nothing but the cache is
rounded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import swiftkv_platform.sources
from benchmarks.common import benchmark_parser, write_report
from swiftkv_platform.evaluation.paired import resampled
from swiftkv_platform.model import convert
from swiftkv_platform.model.cache import cache_bytes, make_cache
from swiftkv_platform.sources.builtin_data import standard_library_modules

TEACHER = Path(swiftkv_platform.sources.__file__).parent / "teacher"
ROW_LENGTH = 512


def held_out_rows(tokenizer: Any, num_rows: int) -> torch.Tensor:
    """Return held-out tokens [num_rows, ROW_LENGTH]."""
    token_ids: list[int] = []
    for module in standard_library_modules():
        if module.held_out:
            token_ids += tokenizer(module.text)["input_ids"]
        if len(token_ids) >= num_rows * ROW_LENGTH:
            break
    return torch.tensor(token_ids[: num_rows * ROW_LENGTH]).view(num_rows, ROW_LENGTH)


def kl_by_row(exact: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Mean KL(exact || actual) over the positions of each row, in nats, of log-probabilities [rows, tokens, vocab]."""
    return torch.stack([(one.exp() * (one - other)).sum(-1).mean() for one, other in zip(exact, actual, strict=True)])


def with_margin(by_row: torch.Tensor) -> tuple[float, float | None]:
    """Return the mean of rows and half of its 95% interval by resampling rows; None for one row."""
    parts = by_row.double().numpy()[:, None]
    return float(by_row.mean()), resampled(parts, lambda sums: sums[:, 0] / len(parts))


@torch.no_grad()
def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("student", type=Path, nargs="?", help="directory; default: an untrained student")
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    if args.student is None:
        model: Any = convert(TEACHER, num_key_value_layers=6, key_value_group_size=2).float()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.student, dtype=torch.float32)
    rows = held_out_rows(AutoTokenizer.from_pretrained(args.student or TEACHER), args.rows)
    teacher = model.swiftkv(False)(rows, use_cache=False).logits.log_softmax(-1)
    results = []
    for swiftkv in (False, True):
        exact = model.swiftkv(swiftkv)(rows, use_cache=False).logits.log_softmax(-1) if swiftkv else teacher
        for kv_cache_dtype in ("auto", "fp8", "int8"):
            model.swiftkv(swiftkv)
            cache = make_cache(model.config, swiftkv=swiftkv, kv_cache_dtype=kv_cache_dtype)
            actual = model(rows, past_key_values=cache).logits.log_softmax(-1)
            value, margin = with_margin(kl_by_row(exact, actual))
            num_bytes = cache_bytes(cache) / rows.numel()
            row = {
                "mode": "student" if swiftkv else "teacher",
                "kv_cache_dtype": "bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype,
                "num_kv_cache_layers": len(cache.layers),
                # Computed in float32; a bfloat16 model would store half as much.
                "kv_bytes_per_token": num_bytes / 2 if kv_cache_dtype == "auto" else num_bytes,
                "kl": value,
                "kl_margin": margin,
                "kl_to_teacher": float(kl_by_row(teacher, actual).mean()),
                "top1_agreement": float((exact.argmax(-1) == actual.argmax(-1)).float().mean()),
            }
            print(json.dumps(row), flush=True)
            results.append(row)
    write_report(results, args.output)


if __name__ == "__main__":
    main()
