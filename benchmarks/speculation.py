"""Drafts side by side with `off`: time per token of `lossless` and of prompt lookup, and what their cost model says.

    python -m benchmarks.speculation [--model DIR] [--intermediate-size 14336] [--output speculation.json] ...

Without `--model`, a student is distilled first, exit head included (`benchmarks/distilled.py`). `--intermediate-size`
widens its layers without changing what it says, so that a head is as small a share of a pass as in larger models.

Loads are held-out sources of the standard library: `continue` them, and `quote` them (a text, then its beginning, for
the answer to go on with). Ways take turns within each round, and every round asks all prompts, `batch_size` at a time;
each request's time per token is the median over rounds, and a way's the mean over requests, of which some draft much
and some nothing. Greedy.

`predicted_ratio` is the cost model over what was counted, in decode passes at batch 1: a pass for each verification,
and shares of one, by the weights they read, for layers below l, evaluations of the exit head and rows of drafts. `row`
is a rule of thumb (one over the tokens at which a step is bound by arithmetic), not measured.

Where a text is not that of `off`, `largest_gap` is by how much, in log-probability, `off` preferred its own token where
they part: rounding depends on how many rows a matrix product has, and decides a tie.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import distilled
from benchmarks.reports import benchmark_parser, write_report
from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from swiftkv_platform.engine.drafting import DraftCosts
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.engine.speculative import draft_costs
from swiftkv_platform.sources.corpus import is_held_out, standard_library_modules

Prompts = list[list[int]]


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
    if args.threads:
        torch.set_num_threads(args.threads)
    config = EngineConfig(dtype=args.dtype, kv_cache_bytes=256 << 20, enable_prefix_caching=False, seed=0)
    with tempfile.TemporaryDirectory() as directory:
        loaded = load_model(prepared(args, Path(directory)), config)
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
            for result in measure(engine, costs, prompts, batch_size, args):
                row = {"load": load, "batch_size": batch_size, **result}
                report["results"].append(row)
                predicted = f"{row['predicted_ratio']:.2f}" if batch_size == 1 else ""
                parted = f"  {row['num_other_texts']} part, at most {row['largest_gap']:.3f} nats apart"
                print(
                    f"{load:<10}{batch_size:6d}  {row['drafts']:<10}{row['mean_tpot_ms']:9.3f}{row['ratio']:7.3f}"
                    f"{predicted:>11}{row['num_draft_tokens']:9d}{row['num_accepted_tokens']:9d}"
                    f"{parted if row['num_other_texts'] else ''}",
                    flush=True,
                )
    write_report(report, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a student with an exit head and a tokenizer")
    parser.add_argument("--intermediate-size", type=int, help="neurons of each MLP; those beyond the model's are zero")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--loads", nargs="+", default=["continue", "quote"], choices=["continue", "quote"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--context-length", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output-length", type=int, default=96)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--num-lookup-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    distilled.add_arguments(parser)
    return parser.parse_args()


def prepared(args: argparse.Namespace, directory: Path) -> Path:
    """The model to serve: given or distilled, and widened where that is asked for."""
    path: Path = args.model or distilled.distil(args, directory / "distilled")
    if args.intermediate_size is None:
        return path
    wide = distilled.widened(AutoModelForCausalLM.from_pretrained(path), args.intermediate_size)
    wide.save_pretrained(directory / "wide")
    AutoTokenizer.from_pretrained(path).save_pretrained(directory / "wide")
    return directory / "wide"


def texts() -> Iterator[str]:
    """Held-out ones first; the rest is what the teacher was trained on."""
    modules = [module for module in standard_library_modules() if len(module.text) > 4000]
    yield from (module.text for module in modules if is_held_out(module.name))
    yield from (module.text for module in modules if not is_held_out(module.name))


def loads(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, Prompts]:
    assert loaded.tokenizer is not None, "the model's directory has no tokenizer"
    some = [loaded.tokenizer(text)["input_ids"] for text in islice(texts(), args.prompts)]
    quoted, begun = args.context_length * 4 // 5, args.context_length // 5
    found = {
        "continue": [ids[: args.context_length] for ids in some],
        "quote": [ids[64 : 64 + quoted] + ids[64 : 64 + begun] for ids in some],
    }
    return {name: found[name] for name in args.loads}


def measure(
    engine: LLMEngine, costs: DraftCosts, prompts: Prompts, batch_size: int, args: argparse.Namespace
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
                outputs = [
                    output
                    for first in range(0, len(prompts), batch_size)
                    for output in engine.generate(prompts[first : first + batch_size], params, progress=False)
                ]
            if number:  # the first round warms up
                runs[name].append(Run(outputs, len(calls)))
    base = mean_tpot(runs["off"])
    for name, some in runs.items():
        tpot = mean_tpot(some)
        outputs = some[0].outputs
        gaps = parting_gaps(engine, runs["off"][0].outputs, outputs)
        yield {
            "drafts": name,
            "mean_tpot_ms": 1000 * tpot,
            "ratio": tpot / base,
            "predicted_ratio": predicted_ratio(some[0], costs, from_exit_head=name.startswith("exit")),
            "num_draft_tokens": sum(output.num_draft_tokens for output in outputs),
            "num_accepted_tokens": sum(output.num_accepted_tokens for output in outputs),
            "num_exit_evaluations": some[0].num_exit_evaluations,
            "num_other_texts": len(gaps),
            "largest_gap": max(gaps, default=0.0),
        }


def mean_tpot(rounds: list[Run]) -> float:
    """Seconds a token: over requests, each by its median round."""
    times: list[float] = [statistics.median(of_one) for of_one in zip(*(run.tpots for run in rounds), strict=True)]
    return statistics.mean(times)


def parting_gaps(engine: LLMEngine, expected: list[RequestOutput], found: list[RequestOutput]) -> list[float]:
    """Return for each answer that is not the expected one how much less probable its first other token was, in nats."""
    gaps = []
    for right, other in zip(expected, found, strict=True):
        if right.token_ids == other.token_ids:
            continue
        pairs = zip(right.token_ids, other.token_ids, strict=True)
        at = next(at for at, (one, another) in enumerate(pairs) if one != another)
        known = [*right.prompt_token_ids, *right.token_ids[:at]]
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, ignore_eos=True)
        (output,) = engine.generate([known], params, progress=False)
        assert output.logprobs is not None
        (best,) = output.logprobs
        gaps.append(abs(best[right.token_ids[at]] - best[other.token_ids[at]]))
    return gaps


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
    """Predicted passes a token after the first, at batch 1."""
    drafted = sum(output.num_draft_tokens for output in run.outputs)
    accepted = sum(output.num_accepted_tokens for output in run.outputs)
    decoded = sum(len(output.token_ids) - 1 for output in run.outputs)
    # Layers below l have run when a draft of the exit head is verified.
    of_a_draft = costs.lower + costs.row * (1.0 - costs.lower) if from_exit_head else costs.row
    spent = decoded - accepted + drafted * of_a_draft
    return (spent + run.num_exit_evaluations * costs.exit_head) / decoded


if __name__ == "__main__":
    main()
