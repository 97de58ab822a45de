"""Knowledge recovery at small budgets: where the student starts, what it is trained on, and which weights are trained.

    python -m benchmarks.recovery starts objectives trained [--spec FILE] [--tokens 50000 100000 200000]
                                  [--seeds 1] [--other-text FILE] [--output recovery.json]

- `starts`: calibrated and copied initialisation, every budget a run of its own with a schedule of its own.
- `objectives` (the paper's table 6a): distillation and the loss on the next token, at the largest budget.
- `trained` (table 6b): q, k, v and every parameter of layers >= l, at the largest budget, also on text of another
  domain: by default the English prose of `pydoc_data.topics`, which ships with the interpreter and is no training text.

`--seeds N` repeats every run with N seeds (`training.seed`, from the spec's on: other rows calibrate the start, and all
train in another order) and prints means and sample standard deviations at the end.

Runs are the trainer's own, in this process. What is frozen in a step (layers below l, and the teacher's above) is the
same in every run over the same rows, so it is computed once and kept in memory: 4 x hidden size bytes a token.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.reports import benchmark_parser, write_report
from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.distillation.checkpoint import Checkpointer, Progress
from swiftkv_platform.distillation.course import CourseNote
from swiftkv_platform.distillation.fork import Fork, load_trained, trained_parameters
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.parallel import parallelize
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.jobs.attempt.checkpoints import AttemptCheckpoints
from swiftkv_platform.jobs.attempt.downloads import teacher_path
from swiftkv_platform.jobs.attempt.preparation import Prepared
from swiftkv_platform.jobs.worker.calibrate import calibrate
from swiftkv_platform.jobs.worker.measure import Evaluation
from swiftkv_platform.jobs.worker.prepare import compute_dtype, load_student, load_tokenizer, open_lazy, prepare
from swiftkv_platform.model.checkpoint import StoredTensors
from swiftkv_platform.specs import DataSourceSpec, DataSpec, DistillationSpec, JobSpec, load_spec
from swiftkv_platform.storage.addresses import open_store

SPEC = Path(__file__).parent / "configs" / "recovery.yaml"
TABLES = ("starts", "objectives", "trained")
FIGURES = ("kl", "top1_agreement", "perplexity_ratio")
Row = dict[str, Any]


class _Quiet:
    """Hears the trainer and says nothing."""

    def on_start(self, progress: Progress) -> None:
        """The table tells as much."""

    def on_course(self, note: CourseNote) -> None:
        """The table tells as much."""

    def on_step(self, metrics: StepMetrics) -> None:
        """The table tells as much."""

    def stop_request(self) -> StopRequest:
        return StopRequest.NONE


class Bench:
    """Runs of one spec that differ in their budget, start, objective and trained weights."""

    def __init__(self, spec: JobSpec, directory: Path, other_text: Path | None) -> None:
        self.directory = directory
        self.path = teacher_path(spec.model, directory)
        plan, data = prepare(spec, directory / "rows")
        self.spec = plan.spec  # what the given one left open is settled
        self.prepared = Prepared(data, self._calibrated(data.train, directory / "start"))
        self.other = self._other_rows(other_text or _prose(directory))
        self._frozen: dict[bytes, Tensor] = {}

    def _calibrated(self, rows: PackedRows, directory: Path) -> StoredTensors | None:
        if self.spec.swiftkv.initialization == "copied":
            return None
        directory.mkdir()
        calibrate(self.spec, self.path, rows, directory, device="cpu")
        return StoredTensors(directory)

    def run(self, tokens: int, *, start: str = "calibrated", objective: str = "logits", trainable: str = "qkv") -> Row:
        """Train on about `tokens` tokens and measure on both domains."""
        train, batch_size = self.prepared.data.train, self.spec.training.batch_size
        assert batch_size is not None, "settled in prepare"
        steps = round(tokens * len(train) / train.num_counted_tokens / batch_size)
        loss = self.spec.distillation.model_copy(update={"objective": objective, "trainable": trainable})
        spec = self.spec.model_copy(update={"distillation": loss})
        trained = self._train(spec, start, steps)
        row: Row = {"tokens": tokens, "start": start, "objective": objective, "trainable": trainable}
        row |= {"seed": spec.training.seed, "steps": steps}
        row["num_trained"] = sum(tensor.numel() for tensor in trained.values())
        row |= self.measure(trained, loss)
        print(json.dumps(row), flush=True)
        return row

    def measure(self, tensors: Mapping[str, Tensor] | None = None, loss: DistillationSpec | None = None) -> Row:
        """A student with `tensors` against its teacher on held-out text, and on the other."""
        figures: Row = {}
        for name, rows in (("held_out", self.prepared.data.held_out), ("other", self.other)):
            lazy, device = open_lazy(self.spec, self.path), torch.device("cpu")
            measured = MeasuredStudent(lazy, loss or self.spec.distillation, sharded=False, device=device)
            measured.start_from(tensors or {})
            totals = measured(lambda student, rows=rows: Evaluation(student, rows, self.spec.evaluation).compare(""))
            figures[name] = totals.student.model_dump() | {
                "perplexity_ratio": totals.student.perplexity / totals.teacher.perplexity
            }
        return figures

    def _train(self, spec: JobSpec, start: str, steps: int) -> dict[str, Tensor]:
        student, dtype = load_student(spec, self.path), compute_dtype(spec)
        if start == "calibrated":
            load_trained(student, self.prepared.calibrated or {})
        fork = Fork(student, spec.distillation, dtype=dtype)
        parallel = parallelize(fork, spec, dtype=dtype, device=torch.device("cpu"))
        request = AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
        with tempfile.TemporaryDirectory(dir=self.directory) as store, self._remembering(fork):
            checkpointer = Checkpointer(parallel, AttemptCheckpoints(open_store(store), request, keep=1), local_rank=0)
            rows: PackedRows = self.prepared.data.train
            Trainer(parallel, rows, checkpointer, spec, total_steps=steps, listener=_Quiet()).run()
        return {name: p.detach().clone() for name, p in trained_parameters(student, spec.distillation).items()}

    @contextmanager
    def _remembering(self, fork: Fork) -> Iterator[None]:
        """Let the fork look up what its frozen layers make of rows that an earlier run has had."""
        teacher = fork.kept_teacher or fork.student.model
        decoder = fork.kept_teacher if fork.trains_lower else fork.student.model
        if decoder is None:  # every layer is trained, and nothing asks for a teacher
            yield
            return
        lower, upper = decoder.lower, teacher.teacher_upper

        def remembered(name: bytes, context: Any, compute: Callable[[], Tensor]) -> Tensor:
            key = name + context.position_ids.numpy().tobytes() + context.hidden.view(torch.int16).numpy().tobytes()
            key = name + hash(key).to_bytes(8, "big", signed=True)
            if key not in self._frozen:
                self._frozen[key] = compute()
            return self._frozen[key]

        decoder.lower = lambda context: remembered(b"lower", context, lambda: lower(context))
        teacher.teacher_upper = lambda x, context, *, record=None: (
            upper(x, context, record=record)
            if record is not None
            else remembered(b"upper", context, lambda: upper(x, context))
        )
        yield
        del decoder.lower, teacher.teacher_upper

    def _other_rows(self, text: Path) -> PackedRows:
        """All of a text, as rows to measure on."""
        tokenizer = load_tokenizer(self.spec, self.path)
        source = DataSourceSpec(name_or_path=str(text))
        data = DataSpec(sources=(source,), max_length=self.spec.data.max_length, validation_fraction=0.0)
        directory = self.directory / "other"
        directory.mkdir()
        return prepare_data(data, tokenizer, directory, seed=0).train


def _prose(directory: Path) -> Path:
    path = directory / "prose.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in topics.values()), encoding="utf-8")
    return path


def run_tables(bench: Bench, tables: list[str], budgets: list[int]) -> list[Row]:
    """Every run once, however many tables show it."""
    wanted: list[dict[str, Any]] = []
    if "starts" in tables:
        wanted += [{"tokens": tokens, "start": start} for tokens in budgets for start in ("copied", "calibrated")]
    if "objectives" in tables:
        wanted += [{"tokens": budgets[-1], "objective": objective} for objective in ("logits", "lm")]
    if "trained" in tables:
        wanted += [{"tokens": budgets[-1], "trainable": trainable} for trainable in ("qkv", "tail", "all")]
    runs: dict[str, Row] = {}
    for arguments in wanted:
        full = {"start": "calibrated", "objective": "logits", "trainable": "qkv", **arguments}
        key = json.dumps(full, sort_keys=True)
        if key not in runs:
            runs[key] = bench.run(**full)
    return list(runs.values())


def spread(rows: Sequence[Row]) -> list[Row]:
    """Runs that differ in their seed alone as one row: mean and sample standard deviation of each figure. A single
    seed has no deviation."""
    alike: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        alike[tuple(row[name] for name in ("tokens", "start", "objective", "trainable"))].append(row)
    table = []
    for (tokens, start, objective, trainable), runs in alike.items():
        line: Row = {"tokens": tokens, "start": start, "objective": objective, "trainable": trainable}
        line["seeds"] = [run["seed"] for run in runs]
        for domain in ("held_out", "other"):
            values = {name: [run[domain][name] for run in runs] for name in FIGURES}
            line[domain] = {
                name: {"mean": statistics.mean(of), "std": statistics.stdev(of) if len(of) > 1 else None}
                for name, of in values.items()
            }
        table.append(line)
    return table


def measure_tables(
    spec: JobSpec, directory: Path, tables: list[str], budgets: list[int], seeds: int, other_text: Path | None = None
) -> dict[str, list[Row]]:
    """The tables with `seeds` seeds: `untrained` (by seed), `runs`, and their `spread`."""
    untrained: list[Row] = []
    runs: list[Row] = []
    for seed in range(spec.training.seed, spec.training.seed + seeds):
        training = spec.training.model_copy(update={"seed": seed})
        of_seed = directory / f"seed-{seed}"
        of_seed.mkdir()
        bench = Bench(spec.model_copy(update={"training": training}), of_seed, other_text)
        untrained.append(
            {"seed": seed, "copied": bench.measure(), "calibrated": bench.measure(bench.prepared.calibrated)}
        )
        print(json.dumps(untrained[-1]), flush=True)
        runs += run_tables(bench, tables, budgets)
    return {"untrained": untrained, "runs": runs, "spread": spread(runs)}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--spec", type=Path, default=SPEC)
    parser.add_argument("--tokens", type=int, nargs="+", default=[50_000, 100_000, 200_000], help="budgets")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument(
        "--other-text", type=Path, help="a file of text or chats that is not the training text's domain"
    )
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds is {args.seeds}; at least 1 would do")
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
        directory = Path(name)
        dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=0, world_size=1)
        figures = measure_tables(
            load_spec(args.spec), directory, args.tables, sorted(args.tokens), args.seeds, args.other_text
        )
        dist.destroy_process_group()
    for line in figures["spread"] if args.seeds > 1 else ():
        print(json.dumps(line))
    write_report(figures, args.output)


if __name__ == "__main__":
    main()
