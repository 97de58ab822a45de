"""KL of a model with the engine's other forms of weights from the same model in float32.

    python -m benchmarks.weight_forms [STUDENT] [--rows 4] [--output weight_forms.json]

STUDENT is the directory of a student that is not quantised, whose exit and teacher play no part; the default is an
untrained one of the built-in teacher. Rows are held-out modules of the standard library, all tokens read as prompts;
KL is the mean over positions, in nats, with half of its 95% interval by row. `int8, inputs too` multiplies as W8A8
says, with inputs in 8 bits for each token, which the engine does not.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import benchmark_parser, write_report
from benchmarks.kv_cache import TEACHER, held_out_rows, kl_by_row, with_margin
from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.engine.loading import load_model
from swiftkv_platform.model import convert
from swiftkv_platform.model.weight_formats import is_projection

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int8, inputs too": {"weights": "int8", "dtype": "float32", "fuse_weights": False},
}


def in_eight_bits(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round inputs to int8 with a scale for each token."""
    scale = (inputs[0].abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((inputs[0] / scale).round() * scale, *inputs[1:])


def logprobs(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities [rows, tokens, vocab] for [rows, tokens], row by row, as the engine's kernels need."""
    logits = torch.cat([model(row[None], use_cache=False).logits for row in rows])
    return logits.float().log_softmax(-1)


@torch.no_grad()
def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("student", type=Path, nargs="?", help="directory; default: an untrained student")
    parser.add_argument("--rows", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.student is None:
            convert(TEACHER, num_key_value_layers=6).save_pretrained(directory)
            held_out = load_model(TEACHER, EngineConfig()).tokenizer
        student = args.student or Path(directory)
        exact = load_model(student, EngineConfig(dtype="float32"))
        rows = held_out_rows(exact.tokenizer if args.student else held_out, args.rows)
        expected = logprobs(exact.model, rows)
        results = {}
        for name, options in FORMS.items():
            model: Any = load_model(student, EngineConfig(**{"dtype": "bfloat16", **options})).model
            if "inputs" in name:
                for path, module in model.named_modules():
                    if is_projection(f"{path}.weight"):
                        module.register_forward_pre_hook(in_eight_bits)
            value, margin = with_margin(kl_by_row(expected, logprobs(model, rows)))
            results[name] = {"kl": value, "margin": margin}
            print(json.dumps({name: results[name]}), flush=True)
    write_report(results, args.output)


if __name__ == "__main__":
    main()
