"""Drafts side by side with `off`: time per token of `lossless` and of prompt lookup, and what their cost model says.

    python -m benchmarks.speculation [--model DIR] [--output speculation.json] [--rounds 5 --batch-sizes 1 8 ...]

Without `--model`, the built-in teacher, converted and calibrated, its exit head not trained: final norm and head as
they were. Loads are held-out sources of the standard library: `continue` them, and `quote` them (a text, then its
beginning, for the answer to go on with). Ways take turns within each round; figures are medians over requests and
rounds. Greedy.

`predicted_ratio` is the cost model over what was counted, in decode passes at batch 1: a pass for each verification,
and shares of one, by the weights they read, for layers below l, evaluations of the exit head and rows of drafts. `row`
is a rule of thumb (one over the tokens at which a step is bound by arithmetic), not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from swiftkv_platform.demo.corpus import is_held_out, standard_library_modules
from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from swiftkv_platform.engine.drafting import DraftCosts
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.engine.speculative import draft_costs
from swiftkv_platform.model import convert

TEACHER = Path(__file__).parents[1] / "swiftkv_platform" / "demo" / "teacher"


@dataclass
class Run:
    """One way's answers to one load, once."""

    outputs: list[RequestOutput]
    num_exit_evaluations: int

    @property
    def tpots(self) -> list[float]:
        return [output.metrics.tpot for output in self.outputs if output.metrics.tpot is not None]


def main() -> None:
    args = parse_arguments()
    config = EngineConfig(dtype=args.dtype, kv_cache_bytes=256 << 20, enable_prefix_caching=False, seed=0)
    with tempfile.TemporaryDirectory() as directory:
        loaded = load_model(args.model or converted_teacher(Path(directory), args), config)
    engine, costs = LLMEngine(loaded, config), draft_costs(loaded.model)
    report: dict[str, Any] = {
        "machine": {"threads": torch.get_num_threads(), "torch": torch.__version__},
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "costs": asdict(costs),
        "results": [],
    }
    print(f"shares of a decode pass: {json.dumps(report['costs'])}")
    print(
        f"{'load':<10}{'batch':>6}  {'drafts':<10}{'TPOT ms':>9}{'ratio':>7}{'predicted':>11}{'drafted':>9}"
        f"{'accepted':>9}"
    )
    for load, prompts in loads(loaded, args).items():
        for batch_size in args.batch_sizes:
            for result in measure(engine, costs, prompts[:batch_size], args):
                row = {"load": load, "batch_size": batch_size, **result}
                report["results"].append(row)
                predicted = f"{row['predicted_ratio']:.2f}" if batch_size == 1 else ""
                print(
                    f"{load:<10}{batch_size:6d}  {row['drafts']:<10}{row['median_tpot_ms']:9.3f}{row['ratio']:7.2f}"
                    f"{predicted:>11}{row['num_draft_tokens']:9d}{row['num_accepted_tokens']:9d}"
                    f"{'' if row['same_text'] else '  another text'}",
                    flush=True,
                )
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a student with an exit head and a tokenizer")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context-length", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output-length", type=int, default=96)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.95, 0.7])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--num-lookup-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--num-key-value-layers", type=int, default=6)
    parser.add_argument("--key-value-group-size", type=int, default=2)
    return parser.parse_args()


def texts() -> Iterator[str]:
    """Held-out ones first; the rest is what the teacher was trained on."""
    modules = [module for module in standard_library_modules() if len(module.text) > 4000]
    yield from (module.text for module in modules if is_held_out(module.name))
    yield from (module.text for module in modules if not is_held_out(module.name))


def converted_teacher(directory: Path, args: argparse.Namespace) -> Path:
    """The built-in teacher as a student, calibrated on text it was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    training = (module.text for module in standard_library_modules() if not is_held_out(module.name))
    calibration = [torch.tensor([tokenizer(text)["input_ids"][:512]]) for text in islice(training, 32)]
    convert(
        str(TEACHER),
        num_key_value_layers=args.num_key_value_layers,
        key_value_group_size=args.key_value_group_size,
        early_exit=True,
        calibration=calibration,
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def loads(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    assert loaded.tokenizer is not None, "the model's directory has no tokenizer"
    some = [loaded.tokenizer(text)["input_ids"] for text in islice(texts(), max(args.batch_sizes))]
    quoted, begun = args.context_length * 4 // 5, args.context_length // 5
    return {
        "continue": [ids[: args.context_length] for ids in some],
        "quote": [ids[64 : 64 + quoted] + ids[64 : 64 + begun] for ids in some],
    }


def measure(
    engine: LLMEngine, costs: DraftCosts, prompts: list[list[int]], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All ways, round by round."""
    off = SamplingParams(max_tokens=args.output_length, temperature=0.0, ignore_eos=True)
    ways = {"off": off, "lookup": replace(off, num_lookup_tokens=args.num_lookup_tokens)}
    for threshold in args.thresholds:
        exits = EarlyExit("lossless", threshold, args.num_draft_tokens)
        ways[f"exit {threshold:g}"] = replace(off, early_exit=exits)
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, params in ways.items():
            with counted_exits(engine) as calls:
                outputs = engine.generate(prompts, params, progress=False)
            if number:  # the first round warms up
                runs[name].append(Run(outputs, len(calls)))
    base = statistics.median(tpot for run in runs["off"] for tpot in run.tpots)
    text = [output.token_ids for output in runs["off"][0].outputs]
    for name, some in runs.items():
        median = statistics.median(tpot for run in some for tpot in run.tpots)
        outputs = some[0].outputs
        yield {
            "drafts": name,
            "median_tpot_ms": 1000 * median,
            "ratio": median / base,
            "predicted_ratio": predicted_ratio(some[0], costs, from_exit_head=name.startswith("exit")),
            "num_draft_tokens": sum(output.num_draft_tokens for output in outputs),
            "num_accepted_tokens": sum(output.num_accepted_tokens for output in outputs),
            "same_text": [output.token_ids for output in outputs] == text,
        }


@contextmanager
def counted_exits(engine: LLMEngine) -> Iterator[list[int]]:
    """The size of each evaluation of the exit head."""
    model: Any = engine._runner._model
    plain, calls = model.exit_logits, []

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        logits: torch.Tensor = plain(x)
        return logits

    model.exit_logits = counting
    try:
        yield calls
    finally:
        del model.exit_logits


def predicted_ratio(run: Run, costs: DraftCosts, *, from_exit_head: bool) -> float:
    """At batch 1: passes a token after the first."""
    drafted = sum(output.num_draft_tokens for output in run.outputs)
    accepted = sum(output.num_accepted_tokens for output in run.outputs)
    decoded = sum(len(output.token_ids) - 1 for output in run.outputs)
    spent = decoded - accepted + drafted * (costs.row + from_exit_head * costs.lower)
    return (spent + run.num_exit_evaluations * costs.exit_head) / decoded


if __name__ == "__main__":
    main()
