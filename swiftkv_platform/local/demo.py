"""End-to-end demo: start a temporary stack, distill a small model, deploy it, generate text, and write a report.

With `--model smollm2` the teacher is a 135M LLM, distilled on its own completions. Student and teacher answer the same
questions, and an interrupted demo resumes. Uses only public interfaces (stack and client).
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
from swiftkv_platform.local.formats import format_flops, format_size
from swiftkv_platform.local.stack import OPERATOR_FILES, Stack, StackOptions
from swiftkv_platform.local.terminal import show_events
from swiftkv_platform.planning.machines import describe_processor
from swiftkv_platform.reports.pages import STAGES
from swiftkv_platform.settings import Settings, get_default_keys_file
from swiftkv_platform.sources.recipes import adapt_dtype_to_cpu, find_recipe
from swiftkv_platform.sources.teacher_config import find_builtin_teacher
from swiftkv_platform.specs import REAL_TEACHER

RECIPE, LLM_RECIPE = "builtin-python-5m", "builtin-smollm2-135m-demo"
LLM_NAMES = ("smollm2", REAL_TEACHER)
"""Values of `--model` that select the 135M LLM."""
COMPLETION_PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as'
CHAT_QUESTIONS = (
    "What is the capital of Japan?",  # not France: its top two tokens nearly tie, so rounding decides
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning to swim.",
)
_MAX_TOKENS, _MAX_ANSWER_TOKENS = 64, 96
_CHAT_TIMEOUT_S = 300.0
_LOG_TAIL_LINES = 30
_MARKER_FILE = "this-is-a-demo"
"""File that marks a demo's home, so that the demo never empties a user's directory."""
_SPEC_METADATA_KEY = "demo-spec"


@dataclass
class Observations:
    """Ids, texts and timings of a run; `demo` in the report."""

    job_id: str = ""
    model_id: str = ""
    deployment_id: str = ""
    prompt: str = COMPLETION_PROMPT
    generated_text: str = ""
    chat: list[dict[str, str]] = field(default_factory=list)
    """Questions with the completions of teacher and student."""
    dtype: str | None = None
    """Data type of training and evaluation."""
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
    """Run the demo, or resume an LLM's, and return its report. Stops the stack at the end, unless the demo succeeded
    with `keep_running`.

    Args:
        model: hub id, directory or one of `LLM_NAMES`. None: the built-in teacher.
        output: path of the report; the loss curve is written next to it as `demo-loss.png`.
        home: directory of database, store and logs; emptied first, except for the LLM.
        short: for the LLM, run all steps within minutes, without learning.

    Raises:
        ModelError: the LLM's package is not installed; the message has the install command.
        SwiftKVError: a step failed; the output names the log directory.
    """
    is_llm = model in LLM_NAMES
    if is_llm:
        find_builtin_teacher(REAL_TEACHER)  # raises before the stack starts
    spec = build_llm_spec(short=short) if is_llm else build_job_spec(model)
    stack = Stack(make_demo_settings(home.expanduser().resolve()))
    prepare_home(stack, keep=is_llm)
    escaped_home, keep_stack = escape(str(stack.home)), False
    with convert_signals_to_exit():
        try:
            report = _run_steps(output, spec, stack, console, is_llm=is_llm)
            keep_stack = keep_running
        finally:
            if keep_stack:
                line = f"The platform keeps running. To stop it: SWIFTKV_HOME={escaped_home} swiftkv down"
                console.print(line, soft_wrap=True)
            else:
                print_heading(console, "Stopping")
                stack.down()
                resume = " Run the same command to resume." if is_llm else ""
                console.print(f"Logs and checkpoints: {escaped_home}.{resume}", soft_wrap=True)
    return report


def _run_steps(output: Path, spec: dict[str, Any], stack: Stack, console: Console, *, is_llm: bool) -> dict[str, Any]:
    observed = Observations(prompt=CHAT_QUESTIONS[0] if is_llm else COMPLETION_PROMPT, dtype=spec["model"].get("dtype"))
    plot_path, plot_error = output.with_name("demo-loss.png"), None
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
                plot_error = plot_loss(client.jobs.metrics(job.id), plot_path)
    report = build_report(evaluation, vars(observed))
    output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print_heading(console, "Report")
    print_report(report, console)
    console.print(f"Report: {output}", highlight=False, soft_wrap=True)
    if not is_llm:
        console.print(f"Loss curve: {plot_error or plot_path}", highlight=False, soft_wrap=True)
    console.print(f"{observed.seconds['total']:.0f} s in all", highlight=False)
    return report


def _start_or_resume_job(client: Client, spec: dict[str, Any], console: Console) -> Job:
    """Return the job of an earlier run with this spec, resumed if paused, else a new job."""
    jobs = client.jobs.list(metadata=spec.get("metadata"))
    earlier = next((job for job in jobs if job.status not in ("failed", "cancelled")), None)
    if earlier is None:
        return client.jobs.create(spec)
    console.print(f"Continuing with job {earlier.id} ({earlier.status}).", highlight=False)
    return client.jobs.resume(earlier.id) if earlier.status == "paused" else earlier


def follow_job(client: Client, job: Job, observed: Observations, console: Console) -> Job:
    """Follow a job until it ends, and return it. Unless it succeeded, print the end of its logs and raise
    `SwiftKVError`."""
    with observed.measure_phase("distill"):
        observed.job_id = job.id
        show_events(client.jobs.events(job.id), console)
        job = client.jobs.get(job.id)
    if job.status != "succeeded" or job.distilled_model is None:
        for line in list(client.jobs.logs(job.id))[-_LOG_TAIL_LINES:]:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
        reason = f"{job.error.code}: {job.error.message}" if job.error else "no reason reported"
        raise SwiftKVError(f"Job {job.id} is {job.status}: {reason}")
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
    console.out(COMPLETION_PROMPT, end="", style="bold", highlight=False)
    pieces = []
    with observed.measure_phase("generate"):
        for piece in client.generate(COMPLETION_PROMPT, stream=True, max_tokens=_MAX_TOKENS, temperature=0.0):
            pieces.append(piece.text)
            console.out(piece.text, end="", highlight=False)
    console.print()
    observed.generated_text = "".join(pieces)


def _compare_answers(
    client: Client, deployment: Resource, observed: Observations, console: Console
) -> list[dict[str, str]]:
    """Ask a deployed model the same questions in student and teacher mode, and print both completions."""
    print_heading(console, "Asking student and teacher")
    with observed.measure_phase("chat"):
        student_texts = _ask_questions(deployment.url, deployment.model)
        client.deployments.update(deployment.id, engine={"swiftkv": False})
        deployment = client.deployments.wait_ready(deployment.id)
        teacher_texts = _ask_questions(deployment.url, deployment.model)
    chat = [
        {"question": question, "teacher": teacher, "student": student}
        for question, teacher, student in zip(CHAT_QUESTIONS, teacher_texts, student_texts, strict=True)
    ]
    observed.generated_text = student_texts[0]
    for turn in chat:
        for speaker, text in turn.items():
            console.print(f"[bold]{speaker:>9}[/] {escape(text.strip())}", highlight=False, soft_wrap=True)
    return chat


def _ask_questions(url: str | None, model: str) -> Sequence[str]:
    """Return greedy completions of `CHAT_QUESTIONS` from `/v1/chat/completions`."""
    texts = []
    for question in CHAT_QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": _MAX_ANSWER_TOKENS, "temperature": 0.0}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_CHAT_TIMEOUT_S)
        if response.is_error:
            raise SwiftKVError(f"{url}/v1/chat/completions returned {response.status_code}: {response.text[:500]}")
        texts.append(str(response.json()["choices"][0]["message"]["content"]))
    return texts


def download_evaluation(client: Client, job: Job) -> dict[str, Any]:
    """Download `evaluation.json` of a job's artifact and return its content."""
    with tempfile.TemporaryDirectory() as directory:
        path = client.jobs.download(job.id, "evaluation.json", Path(directory) / "evaluation.json")
        evaluation: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return evaluation


def build_job_spec(model: str | None) -> dict[str, Any]:
    """Return the job spec of the packaged recipe. `model`: another teacher; prompts then skip half of its layers."""
    spec: dict[str, Any] = yaml.safe_load(find_recipe(RECIPE).read_text(encoding="utf-8"))
    if model is not None:
        path = Path(model).expanduser()
        # The job's working directory differs from this process's.
        spec["model"] = {**spec.get("model", {}), "name_or_path": str(path.resolve()) if path.exists() else model}
        swiftkv = spec.get("swiftkv", {})
        swiftkv.pop("num_key_value_layers", None)
        spec["swiftkv"] = {**swiftkv, "prefill_reduction": 0.5}
    return adapt_dtype_to_cpu(spec)


def build_llm_spec(*, short: bool = False) -> dict[str, Any]:
    """Return the LLM recipe's job spec. `short`: run all steps within minutes, without learning."""
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
    return {**spec, "metadata": {_SPEC_METADATA_KEY: digest}}


def make_demo_settings(home: Path) -> Settings:
    """Return the demo stack's settings: without the operator's database, object store and key files."""
    files = dict.fromkeys(OPERATOR_FILES)
    return Settings.model_validate({"home": home, "database_url": None, "storage_uri": None, **files})


def prepare_home(stack: Stack, *, keep: bool) -> None:
    """Create the stack's home; empty an earlier demo's home unless `keep`. Raises `InvalidInputError` for a non-empty
    directory of something else, or a kept home with API keys."""
    mark = stack.home / _MARKER_FILE
    if stack.home.exists() and any(stack.home.iterdir()):
        if not mark.exists():
            raise InvalidInputError(
                f"{stack.home} is not empty and not from an earlier demo; use an empty directory as --home",
                field="home",
                value=str(stack.home),
            )
        if not keep:
            stack.down()
            shutil.rmtree(stack.home)
        elif (keys := get_default_keys_file(stack.home)).exists():
            raise InvalidInputError.for_field(
                "home", str(stack.home), f"; the demo runs without API keys; move {keys} to another directory"
            )
    stack.home.mkdir(parents=True, exist_ok=True)
    mark.touch()


@contextmanager
def convert_signals_to_exit() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP (closed terminal) to `SystemExit`, so that `finally` blocks stop the stack."""

    def exit_process(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    handlers = {number: signal.signal(number, exit_process) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def print_heading(console: Console, title: str) -> None:
    """Print the heading of a step."""
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
    """Join the job's evaluation and the demo's observations (`demo`). Raises `SwiftKVError` for a missing metric."""
    missing = [name for name in _EVALUATION_KEYS if name not in evaluation]
    if missing:
        raise SwiftKVError(f"evaluation.json of the artifact has no {', '.join(missing)}")
    demo = {**observed, "machine": describe_machine()}
    return {**{name: evaluation[name] for name in _EVALUATION_KEYS}, "demo": demo}


def describe_machine() -> dict[str, Any]:
    """Return hardware and versions. The built-in teacher's data is Python's standard library, so Python matters."""
    name, simd = describe_processor()
    return {
        "processor": name,
        "simd": simd,
        "num_cpus": os.cpu_count(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the quality by stage, and the inference cost with and without SwiftKV."""
    table = Table("held-out text", "perplexity", "KL (nats)", "top-1 agreement", title="Quality")
    table.add_row("teacher", f"{report['teacher']['perplexity']:.2f}", "", "")
    for name, label in STAGES.items():
        stage = report.get(name)
        if stage is not None:
            table.add_row(label, f"{stage['perplexity']:.2f}", f"{stage['kl']:.4f}", f"{stage['top1_agreement']:.1%}")
    table.caption = f"{report['kl_recovered']:.0%} of the KL recovered with {report['tokens_trained']:,} tokens"
    console.print(table)
    table = Table(f"prompt of {report['prompt_length']:,} tokens", "dense", "SwiftKV", "ratio", title="Cost")
    figures = (
        ("prefill per token", "prefill_flops_per_token", format_flops),
        ("KV cache per token", "kv_bytes_per_token", format_size),
        ("time to first token", "ttft_ms", "{:.0f} ms".format),
    )
    for label, key, shown in figures:
        dense, swiftkv = report[key]["dense"], report[key]["swiftkv"]
        table.add_row(label, shown(dense), shown(swiftkv), f"{swiftkv / dense:.3f}")
    console.print(table)


def plot_loss(points: Sequence[Resource], path: Path) -> str | None:
    """Plot the logits loss over trained tokens to a PNG. Returns None, or why there is no plot."""
    rows = [point.model_dump() for point in points]
    measured = [(row["tokens"], row["logits_loss"]) for row in rows if row.get("tokens") and row.get("logits_loss")]
    if not measured:
        return "the job reported no loss"
    try:
        from matplotlib.figure import Figure  # pyplot would need a display
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
