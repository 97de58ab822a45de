"""End-to-end demo: start a stack of its own, distill a small model, deploy it, generate text, and write a report.

With `--model smollm2` the student is a real LLM, distilled on its own answers; student and teacher answer the same
questions, and an interrupted demo continues where it stopped. Uses only public interfaces (stack and client), so any
user can do the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import httpx
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swiftkv_platform.client import Client, Job, Resource
from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.local.stack import OPERATOR_FILES, Stack, StackOptions
from swiftkv_platform.local.terminal import format_flops, format_size, show_events
from swiftkv_platform.planning.machines import describe_processor
from swiftkv_platform.settings import Settings, get_default_keys_file
from swiftkv_platform.sources.recipes import adapt_dtype_to_cpu, find_recipe
from swiftkv_platform.sources.teacher_config import find_builtin_teacher
from swiftkv_platform.specs import REAL_TEACHER

RECIPE, LLM_RECIPE = "builtin-python-5m", "builtin-smollm2-135m-demo"
LLM_NAMES = ("smollm2", REAL_TEACHER)
"""Values of `--model` that select the real LLM."""
PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as'
QUESTIONS = (
    "What is the capital of Japan?",  # for France the first word is a near tie, which rounding decides per machine
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning to swim.",
)
_MAX_TOKENS, _MAX_ANSWER_TOKENS = 64, 96
_CHAT_TIMEOUT_S = 300.0
_LOG_TAIL_LINES = 30
_MARKER_FILE = "this-is-a-demo"
"""File that marks a home as made by the demo, so that no directory of the user's is emptied."""
_SPEC_LABEL = "demo-spec"


@dataclass
class Observations:
    """Ids, text and timings that the demo observed; `demo` in the report."""

    job_id: str = ""
    model_id: str = ""
    deployment_id: str = ""
    prompt: str = PROMPT
    generated_text: str = ""
    chat: list[dict[str, str]] = field(default_factory=list)
    """The LLM's questions, each with the answers of teacher and student."""
    dtype: str | None = None
    """Data type that the job trained and measured in."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, and `total`."""

    @contextmanager
    def measure_phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)


def run_demo(
    model: str | None, output: Path, home: Path, console: Console, *, short: bool, keep_running: bool
) -> dict[str, Any]:
    """Run the demo, or continue an LLM's, and return its report. Stops the stack at the end, except after a success
    with `keep_running`.

    Args:
        model: teacher instead of the built-in one: hub id, directory or one of `LLM_NAMES`.
        output: path of the report; the loss curve is written next to it as `demo-loss.png`.
        home: directory of databases, store and logs; emptied first, except for the LLM.
        short: for the LLM: run every part within a few minutes, too short to learn anything.

    Raises:
        ModelError: the package with the LLM is not installed; the message has the command.
        SwiftKVError: a step failed; the output says where the logs are.
    """
    is_llm = model in LLM_NAMES
    if is_llm:
        find_builtin_teacher(REAL_TEACHER)  # raises before anything is started
    spec = build_llm_spec(short=short) if is_llm else build_job_spec(model)
    stack = Stack(make_demo_settings(home.expanduser().resolve()))
    prepare_home(stack, keep=is_llm)
    place, kept = escape(str(stack.home)), False
    with convert_signals_to_exit():
        try:
            report = _run_steps(output, spec, stack, console, is_llm=is_llm)
            kept = keep_running
        finally:
            if kept:
                console.print(f"Still running; SWIFTKV_HOME={place} swiftkv down stops it.", soft_wrap=True)
            else:
                print_heading(console, "Stopping")
                stack.down()
                then = "; the same command continues from there." if is_llm else "."
                console.print(f"Logs and checkpoints are in {place}{then}", soft_wrap=True)
    return report


def _run_steps(output: Path, spec: dict[str, Any], stack: Stack, console: Console, *, is_llm: bool) -> dict[str, Any]:
    observed = Observations(prompt=QUESTIONS[0] if is_llm else PROMPT, dtype=spec["model"].get("dtype"))
    picture, unplotted = output.with_name("demo-loss.png"), None
    with observed.measure_phase("total"):
        print_heading(console, "Starting Ray and the control plane")
        with observed.measure_phase("up"):
            state = stack.up(StackOptions(port=0), lambda line: console.print(f"  {escape(line)}", highlight=False))
        with Client(state.url, serve_url=state.serve_url) as client:
            job = _start_or_resume_job(client, spec, console)
            print_heading(
                console, f"Distilling {spec['model']['name_or_path']} in {observed.dtype or 'bfloat16'} ({job.id})"
            )
            job = follow_job(client, job, observed, console)
            evaluation = download_evaluation(client, job)
            deployment = _deploy_model(client, job, observed, console)
            if is_llm:
                observed.chat = _compare_answers(client, deployment, observed, console)
            else:
                _generate_text(client, observed, console)
                unplotted = plot_loss(client.jobs.metrics(job.id), picture)
    report = build_report(evaluation, vars(observed))
    output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_heading(console, "Report")
    print_report(report, console)
    console.print(f"Report: {output}", highlight=False, soft_wrap=True)
    if not is_llm:
        console.print(f"Loss curve: {f'none, {unplotted}' if unplotted else picture}", highlight=False, soft_wrap=True)
    console.print(f"{observed.seconds['total']:.0f} s in all", highlight=False)
    return report


def _start_or_resume_job(client: Client, spec: dict[str, Any], console: Console) -> Job:
    """Return the job that an earlier run created from this spec, resumed if paused, else a new one."""
    jobs = client.jobs.list(metadata=spec.get("metadata"))
    before = [job for job in jobs if job.status not in ("failed", "cancelled")]
    if not before:
        return client.jobs.create(spec)
    console.print(f"Continuing with job {before[0].id}, which is {before[0].status}.", highlight=False)
    return client.jobs.resume(before[0].id) if before[0].status == "paused" else before[0]


def follow_job(client: Client, job: Job, observed: Observations, console: Console) -> Job:
    """Show a job until it ends, and return it. If it did not succeed, print the end of its logs and raise
    `SwiftKVError`."""
    with observed.measure_phase("distill"):
        observed.job_id = job.id
        show_events(client.jobs.events(job.id), console)
        job = client.jobs.get(job.id)
    if job.status != "succeeded" or job.distilled_model is None:
        for line in list(client.jobs.logs(job.id))[-_LOG_TAIL_LINES:]:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
        reason = f"{job.error.code}: {job.error.message}" if job.error else "no reason given"
        raise SwiftKVError(f"Job {job.id} has {job.status}: {reason}")
    observed.model_id = job.distilled_model
    return job


def _deploy_model(client: Client, job: Job, observed: Observations, console: Console) -> Resource:
    print_heading(console, f"Deploying {job.distilled_model}")
    for stale in client.deployments.list():  # left by an interrupted run
        client.deployments.delete(stale.id)
    with observed.measure_phase("deploy"):
        deployment = client.deployments.create(job.distilled_model)
        observed.deployment_id = deployment.id
        return client.deployments.wait_ready(deployment.id)


def _generate_text(client: Client, observed: Observations, console: Console) -> None:
    print_heading(console, "Generating")
    console.out(PROMPT, end="", style="bold", highlight=False)
    pieces = []
    with observed.measure_phase("generate"):
        for piece in client.generate(PROMPT, stream=True, max_tokens=_MAX_TOKENS, temperature=0.0):
            pieces.append(piece.text)
            console.out(piece.text, end="", highlight=False)
    console.print()
    observed.generated_text = "".join(pieces)


def _compare_answers(
    client: Client, deployment: Resource, observed: Observations, console: Console
) -> list[dict[str, str]]:
    """Ask a deployed artifact the same questions as student and as teacher, and print both answers."""
    print_heading(console, "Asking student and teacher")
    with observed.measure_phase("chat"):
        students = _ask_questions(deployment.url, deployment.model)
        client.deployments.update(deployment.id, engine={"swiftkv": False})
        deployment = client.deployments.wait_ready(deployment.id)
        teachers = _ask_questions(deployment.url, deployment.model)
    talks = [
        {"question": question, "teacher": teacher, "student": student}
        for question, teacher, student in zip(QUESTIONS, teachers, students, strict=True)
    ]
    observed.generated_text = students[0]
    for talk in talks:
        for who, text in talk.items():
            console.print(f"[bold]{who:>9}[/] {escape(text.strip())}", highlight=False, soft_wrap=True)
    return talks


def _ask_questions(url: str | None, model: str) -> Sequence[str]:
    """Return greedy answers to `QUESTIONS` from `/v1/chat/completions`."""
    texts = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": _MAX_ANSWER_TOKENS, "temperature": 0.0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_CHAT_TIMEOUT_S)
        if answer.is_error:
            raise SwiftKVError(f"{url}/v1/chat/completions answered {answer.status_code}: {answer.text[:500]}")
        texts.append(str(answer.json()["choices"][0]["message"]["content"]))
    return texts


def download_evaluation(client: Client, job: Job) -> dict[str, Any]:
    """Download `evaluation.json` of a job's artifact and return its content."""
    with tempfile.TemporaryDirectory() as directory:
        path = client.jobs.download(job.id, "evaluation.json", Path(directory) / "evaluation.json")
        evaluation: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return evaluation


def build_job_spec(model: str | None) -> dict[str, Any]:
    """Return the job spec of the packaged recipe. `model`: another teacher, of which half the layers are skipped."""
    spec: dict[str, Any] = yaml.safe_load(find_recipe(RECIPE).read_text(encoding="utf-8"))
    if model is not None:
        path = Path(model).expanduser()
        # The job runs in another directory than this process.
        spec["model"] = {**spec.get("model", {}), "name_or_path": str(path.resolve()) if path.exists() else model}
        swiftkv = spec.get("swiftkv", {})
        swiftkv.pop("num_key_value_layers", None)
        spec["swiftkv"] = {**swiftkv, "prefill_reduction": 0.5}
    return adapt_dtype_to_cpu(spec)


def build_llm_spec(*, short: bool = False) -> dict[str, Any]:
    """Return the recipe's job spec. `short`: run every part within a few minutes, too short to learn anything."""
    spec = adapt_dtype_to_cpu(yaml.safe_load(find_recipe(LLM_RECIPE).read_text(encoding="utf-8")))
    if short:
        for source, count in zip(spec["data"]["sources"], (4, 2), strict=True):
            source["sample_count"] = count
            source["complete"] = {**source["complete"], "max_tokens": 12}
        spec["data"]["max_length"] = 128
        spec["swiftkv"]["calibration_tokens"] = 1024
        spec["training"] |= {"max_steps": 2, "batch_size": 1, "micro_batch_size": 1, "keep_best": False}
        spec["evaluation"] |= {"max_tokens": 256, "continuations": 0}
        spec["name"] += "-short"
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {**spec, "metadata": {_SPEC_LABEL: digest}}


def make_demo_settings(home: Path) -> Settings:
    """Return settings of a stack of its own: without the operator's database, store and files of keys."""
    files = dict.fromkeys(OPERATOR_FILES)
    return Settings.model_validate({"home": home, "database_url": None, "storage_uri": None, **files})


def prepare_home(stack: Stack, *, keep: bool) -> None:
    """Prepare the stack's home, emptied of an earlier demo unless `keep`. Raises `InvalidInputError` for a non-empty
    directory that no demo made, and for a kept one with API keys."""
    mark = stack.home / _MARKER_FILE
    if stack.home.exists() and any(stack.home.iterdir()):
        if not mark.exists():
            raise InvalidInputError(
                f"{stack.home} is not empty and not an earlier demo's; use another --home, or an empty one",
                field="home",
                value=str(stack.home),
            )
        if not keep:
            stack.down()
            shutil.rmtree(stack.home)
        elif (keys := get_default_keys_file(stack.home)).exists():
            raise InvalidInputError.for_field(
                "home", str(stack.home), f"; the demo runs without API keys: move {keys} away"
            )
    stack.home.mkdir(parents=True, exist_ok=True)
    mark.touch()


@contextmanager
def convert_signals_to_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP (closed terminal) into `SystemExit`, so that what was started is stopped."""

    def leave(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_heading(console: Console, title: str) -> None:
    """Print the heading of a part of the demo."""
    console.rule(f"[bold]{escape(title)}", align="left")


_EVALUATION_KEYS = (
    "teacher",
    "rewired",
    "calibrated",
    "distilled",
    "perplexity_ratio",
    "kl_recovered",
    "num_positions",
    "intervals",
    "prefill_flops_ratio",
    "kv_bytes_ratio",
    "prompt_length",
    "prefill_flops_per_token",
    "kv_bytes_per_token",
    "ttft_ms",
    "tokens_trained",
)


def build_report(evaluation: Mapping[str, Any], observed: Mapping[str, Any]) -> dict[str, Any]:
    """Join the job's evaluation with the demo's observations (`demo`). Raises `SwiftKVError` if a figure is missing."""
    missing = [name for name in _EVALUATION_KEYS if name not in evaluation]
    if missing:
        raise SwiftKVError(f"evaluation.json of the artifact lacks {', '.join(missing)}")
    demo = {**observed, "machine": describe_machine()}
    return {**{name: evaluation[name] for name in _EVALUATION_KEYS}, "demo": demo}


def describe_machine() -> dict[str, Any]:
    """Return what a run's figures and times depend on. The built-in teacher's text is the running Python's library."""
    name, simd = describe_processor()
    return {
        "processor": name,
        "simd": simd,
        "num_cpus": os.cpu_count(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the quality of each stage, then the cost with and without SwiftKV."""
    table = Table("held-out text", "perplexity", "KL (nats)", "top-1 agreement", title="Quality")
    table.add_row("teacher", f"{report['teacher']['perplexity']:.2f}", "", "")
    stages = {
        "rewired": "rewired, projections copied",
        "calibrated": "rewired, projections calibrated",
        "distilled": "distilled",
    }
    for name, label in stages.items():
        stage = report[name]
        if stage is not None:
            table.add_row(label, f"{stage['perplexity']:.2f}", f"{stage['kl']:.4f}", f"{stage['top1_agreement']:.1%}")
    table.caption = f"{report['kl_recovered']:.0%} of the KL recovered with {report['tokens_trained']:,} tokens"
    console.print(table)
    table = Table(f"prompt of {report['prompt_length']:,} tokens", "dense", "SwiftKV", "ratio", title="Cost")
    figures = (
        ("prefill a token", "prefill_flops_per_token", format_flops),
        ("KV cache a token", "kv_bytes_per_token", format_size),
        ("time to first token", "ttft_ms", "{:.0f} ms".format),
    )
    for label, key, shown in figures:
        dense, swiftkv = report[key]["dense"], report[key]["swiftkv"]
        table.add_row(label, shown(dense), shown(swiftkv), f"{swiftkv / dense:.3f}")
    console.print(table)


def plot_loss(points: Sequence[Resource], path: Path) -> str | None:
    """Plot the logits loss over the tokens trained on to a PNG.

    Returns None, or the reason why there is no plot.
    """
    rows = [point.model_dump() for point in points]
    measured = [(row["tokens"], row["logits_loss"]) for row in rows if row.get("tokens") and row.get("logits_loss")]
    if not measured:
        return "the job reported no loss"
    try:
        # `Figure` instead of pyplot: no display, no global state.
        from matplotlib.figure import Figure
    except ImportError:
        return f"matplotlib is not installed ({make_install_command('plot')})"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*measured, strict=True), linewidth=1.2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("logits loss (temperature 2)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return None
