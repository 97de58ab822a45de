"""Students of one teacher at several depths and group sizes, at equal tokens over the same answers of the teacher.

    python -m benchmarks.depths DIRECTORY [--spec benchmarks/configs/smollm2-depths.yaml]
                                [--points 22:1 15:1 15:2 15:1:refitted 11:1] [--steps 150] [--output depths.json]
                                [--needle-lengths 512 1024] [--needle-samples 20] [--early-exit]

The spec names the teacher, the data and the loss; a point `l:g` or `l:g:START` takes the place of its `swiftkv`
section. Where layers share a KV cache layer, and with a refitted start, they have output projections of their own;
`--early-exit` trains an exit head beside. Runs are the trainer's own in this process, with guard and best state as in a
job; with `--steps 0` starts alone are measured.

A point has KL, agreement and perplexity ratio on the held-out answers, before and after training, by position in the
answer and by prompt length; numbers that teacher and student find in prompts of each length; with an exit head its
agreement by confidence (the paper's figure D.1), and greedy answers with and without early exit at 0.95 (tables D.2,
E.1). DIRECTORY keeps the answers, and every point that is done: what was cut off goes on there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reports import benchmark_parser, conditions, write_report
from benchmarks.training_runs import TrainedRun, TrainingRuns, one_worker
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.evaluation.depths import Needles
from swiftkv_platform.evaluation.quality import Totals
from swiftkv_platform.evaluation.report import exit_bins, quality_bins
from swiftkv_platform.jobs.worker.generate_data import AttemptAnswers, write
from swiftkv_platform.jobs.worker.prepare import load_tokenizer
from swiftkv_platform.specs import JobSpec, load_spec
from swiftkv_platform.storage.addresses import open_store

SPEC = Path(__file__).parent / "configs" / "smollm2-depths.yaml"
POINTS = ("22:1", "15:1", "15:2", "15:1:refitted", "11:1")
QUESTIONS = (
    "What are the three primary colors?",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning to swim.",
)
ANSWER_TOKENS = 96
Row = dict[str, Any]


def point_spec(spec: JobSpec, point: str, args: argparse.Namespace) -> JobSpec:
    """The spec of one point, `l:g` or `l:g:START`."""
    layers, group_size, *start = point.split(":")
    swiftkv = {
        "num_key_value_layers": int(layers),
        "key_value_group_size": int(group_size),
        "own_output_projection": int(group_size) > 1 or start == ["refitted"],
        "early_exit": args.early_exit,
        "initialization": start[0] if start else "calibrated",
        "calibration_tokens": args.calibration_tokens or spec.swiftkv.calibration_tokens,
    }
    document = spec.model_dump(mode="json", exclude_unset=True)
    training = document["training"] | {"max_steps": max(args.steps, 1)}
    return JobSpec.model_validate(document | {"swiftkv": swiftkv, "training": training})


def name_of(point: str, args: argparse.Namespace) -> str:
    """Name of what is kept of a point, which says everything that decides its figures beside the spec."""
    tokens = f"-{args.calibration_tokens}" if args.calibration_tokens else ""
    return f"{point.replace(':', '-')}{'-exit' if args.early_exit else ''}{tokens}-{args.steps}-steps"


def figures(totals: Totals) -> Row:
    """A student on held-out text, against its teacher."""
    ratio = totals.student.perplexity / totals.teacher.perplexity
    bins = {
        name: [one.model_dump() for one in quality_bins(sums)]
        for name, sums in (("by_position", totals.by_position), ("by_prompt_length", totals.by_prompt_length))
    }
    return totals.student.model_dump() | {"perplexity_ratio": ratio, "positions": totals.num_positions} | bins


def needles_found(runs: TrainingRuns, run: TrainedRun, needles: list[Needles], *, swiftkv: bool) -> dict[int, float]:
    """Share of the numbers that the student, or its teacher, finds, by prompt length."""
    model = runs.load(run.spec, run.end).swiftkv(swiftkv)
    return {one.length: one.share_found(model) for one in needles}


def exit_answers(runs: TrainingRuns, run: TrainedRun, tokenizer: Any) -> list[Row]:
    """Greedy answers of the student that exits early and of the one that does not."""
    student = runs.load(run.spec, run.end)
    rows = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        settings = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "return_dict_in_generate": True}
        full = student.generate(**prompt, **settings)
        early = student.generate(**prompt, **settings, early_exit={"mode": "threshold", "threshold": 0.95})
        begin = prompt["input_ids"].shape[1]
        row = {
            "question": question,
            "full": tokenizer.decode(full.sequences[0, begin:], skip_special_tokens=True),
            "early": tokenizer.decode(early.sequences[0, begin:], skip_special_tokens=True),
            "num_tokens": early.sequences.shape[1] - begin,
            "num_exited": int(early.num_exited_tokens.sum()),
        }
        rows.append(row)
    return rows


def measure(runs: TrainingRuns, run: TrainedRun, needles: list[Needles], tokenizer: Any) -> Row:
    """All figures of a point."""
    start, end = runs.totals(run.spec, run.start), runs.totals(run.spec, run.end)
    exits = exit_bins(end.exit_head)
    return {
        "swiftkv": run.spec.swiftkv.model_dump(mode="json"),
        "learning_rate": run.spec.optimizer.learning_rate,
        "tokens": run.tokens,
        "notes": [note.message for note in run.notes],
        "start": figures(start),
        "end": figures(end),
        "needles": needles_found(runs, run, needles, swiftkv=True),
        "exit_head": None if exits is None else [one.model_dump() for one in exits],
        "exit_answers": None if exits is None else exit_answers(runs, run, tokenizer),
    }


def main() -> int:
    args = parse_arguments()
    spec = load_spec(args.spec)
    args.directory.mkdir(parents=True, exist_ok=True)
    store_uri = str(args.directory.resolve())
    request = AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
    rows: dict[str, Row] = {}
    teacher = args.directory / "teacher-needles.json"
    with tempfile.TemporaryDirectory(dir=args.directory) as name, one_worker(Path(name)):
        write(request, store_uri, worker=0)
        runs = TrainingRuns(spec, Path(name) / "runs", AttemptAnswers(open_store(store_uri), request))
        tokenizer = load_tokenizer(spec, runs.path)
        needles = [Needles.create(tokenizer, length, args.needle_samples) for length in args.needle_lengths]
        for point in args.points:
            done = args.directory / f"{name_of(point, args)}.json"
            if not done.is_file():
                with tempfile.TemporaryDirectory(dir=name) as trained:
                    settled = point_spec(spec, point, args)
                    run = runs.train(settled, Path(trained)) if args.steps else runs.untrained(settled)
                    write_report(measure(runs, run, needles, tokenizer), done)
                    if needles and not teacher.is_file():
                        write_report(needles_found(runs, run, needles, swiftkv=False), teacher)
            rows[point] = json.loads(done.read_text(encoding="utf-8"))
            print_row(point, rows[point])
    found = json.loads(teacher.read_text(encoding="utf-8")) if needles else {}
    print(f"needles that the teacher finds: {found}", flush=True)
    write_report({"conditions": conditions(args), "points": rows, "teacher_needles": found}, args.output)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("directory", type=Path, help="where answers and finished points are kept")
    parser.add_argument("--spec", type=Path, default=SPEC, help="job spec of the teacher, the data and the loss")
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="l:g[:START]")
    parser.add_argument("--steps", type=int, default=150, help="of training; 0: measure starts alone")
    parser.add_argument("--calibration-tokens", type=int, help="of the start; default: as the spec says")
    parser.add_argument("--needle-lengths", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--needle-samples", type=int, default=20)
    parser.add_argument("--early-exit", action="store_true", help="train an exit head at layer l beside")
    return parser.parse_args()


def print_row(point: str, row: Row) -> None:
    start, end = row["start"], row["end"]
    found = ", ".join(f"{share:.0%} of {length}" for length, share in row["needles"].items())
    print(
        f"{point:>6}  KL {start['kl']:.3f} -> {end['kl']:.3f}, {end['perplexity_ratio']:.3f}x, agreement "
        f"{end['top1_agreement']:.1%}, {row['tokens']:,} tokens; needles {found}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
