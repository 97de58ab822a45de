"""End-to-end demo: start a stack of its own, run the demo job, deploy the model, generate text, write a report.

Uses only public interfaces (stack and client), so any user can do the same.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rich.console import Console
from rich.markup import escape

from swiftkv_platform.client import Client, Job
from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.local.demo.report import build_report, plot_loss, print_report, write_report
from swiftkv_platform.local.stack import OPERATOR_FILES, Stack, StackOptions
from swiftkv_platform.local.terminal import follow
from swiftkv_platform.settings import Settings, default_keys_file
from swiftkv_platform.sources.recipes import recipe, suited_to_cpu

RECIPE = "builtin-python-5m"
PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as'
_MAX_TOKENS = 64
_LOG_TAIL_LINES = 30
_HOME_MARK = "this-is-a-demo"
"""File that marks a home as made by the demo, so that no directory of the user's is emptied."""


@dataclass(frozen=True)
class DemoOptions:
    output: Path
    """Path of the report; the loss curve is written next to it as `demo-loss.png`."""
    home: Path
    """Directory of databases, store and logs; emptied first."""
    model: str | None = None
    """Teacher instead of the built-in one: hub id or directory."""
    keep_running: bool = False


@dataclass
class Observed:
    """Ids, text and timings that the demo observed; `demo` in the report."""

    job_id: str = ""
    model_id: str = ""
    deployment_id: str = ""
    prompt: str = PROMPT
    generated_text: str = ""
    dtype: str | None = None
    """Data type that the job trained and measured in."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, and `total`."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the demo and return its report. Stops the stack at the end, except after a success with `keep_running`.
    Raises `SwiftKVError` if a step failed; the output says where the logs are."""
    home = options.home.expanduser().resolve()
    spec = job_spec(options.model)
    stack = Stack(demo_settings(home))
    claim_home(stack, keep=False)
    with signals_as_exit():
        try:
            report = _run(options, spec, stack, console)
        except BaseException:
            console.print(f"[yellow]The demo did not finish; logs are in {escape(str(stack.logs))}[/]", soft_wrap=True)
            stack.down()
            raise
        if options.keep_running:
            console.print(f"Still running; SWIFTKV_HOME={escape(str(home))} swiftkv down stops it.", soft_wrap=True)
        else:
            step(console, "Stopping")
            stack.down()
    return report


def _run(options: DemoOptions, spec: dict[str, Any], stack: Stack, console: Console) -> dict[str, Any]:
    observed = Observed(dtype=spec["model"].get("dtype"))
    with observed.phase("total"):
        step(console, "Starting Ray and the control plane")
        with observed.phase("up"):
            state = stack.up(StackOptions(port=0), lambda line: console.print(f"  {escape(line)}", highlight=False))
        with Client(state.url, serve_url=state.serve_url) as client:
            job = _distill(client, spec, observed, console)
            _deploy_and_generate(client, job, observed, console)
            evaluation = download_evaluation(client, job)
            picture = options.output.with_name("demo-loss.png")
            unplotted = plot_loss(client.jobs.metrics(job.id), picture)
    report = build_report(evaluation, vars(observed))
    write_report(report, options.output)
    step(console, "Report")
    print_report(report, console)
    console.print(f"Report: {options.output}", highlight=False, soft_wrap=True)
    console.print(f"Loss curve: {f'none, {unplotted}' if unplotted else picture}", highlight=False, soft_wrap=True)
    console.print(f"{observed.seconds['total']:.0f} s in all", highlight=False)
    return report


def _distill(client: Client, spec: dict[str, Any], observed: Observed, console: Console) -> Job:
    step(console, f"Distilling {spec['model']['name_or_path']} in {spec['model'].get('dtype', 'bfloat16')}")
    return follow_job(client, client.jobs.create(spec), observed, console)


def follow_job(client: Client, job: Job, observed: Observed, console: Console) -> Job:
    """Show a job until it ends, and return it. If it did not succeed, print the end of its logs and raise
    `SwiftKVError`."""
    with observed.phase("distill"):
        observed.job_id = job.id
        follow(client.jobs.events(job.id), console)
        job = client.jobs.get(job.id)
    if job.status != "succeeded" or job.distilled_model is None:
        for line in list(client.jobs.logs(job.id))[-_LOG_TAIL_LINES:]:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
        reason = f"{job.error.code}: {job.error.message}" if job.error else "no reason given"
        raise SwiftKVError(f"Job {job.id} has {job.status}: {reason}")
    observed.model_id = job.distilled_model
    return job


def _deploy_and_generate(client: Client, job: Job, observed: Observed, console: Console) -> None:
    step(console, f"Deploying {job.distilled_model}")
    with observed.phase("deploy"):
        deployment = client.deployments.create(job.distilled_model)
        observed.deployment_id = deployment.id
        client.deployments.wait_ready(deployment.id)
    step(console, "Generating")
    console.out(PROMPT, end="", style="bold", highlight=False)
    pieces = []
    with observed.phase("generate"):
        for piece in client.generate(PROMPT, stream=True, max_tokens=_MAX_TOKENS, temperature=0.0):
            pieces.append(piece.text)
            console.out(piece.text, end="", highlight=False)
    console.print()
    observed.generated_text = "".join(pieces)


def download_evaluation(client: Client, job: Job) -> dict[str, Any]:
    """Download `evaluation.json` of a job's artifact and return its content."""
    with tempfile.TemporaryDirectory() as directory:
        path = client.jobs.download(job.id, "evaluation.json", Path(directory) / "evaluation.json")
        evaluation: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return evaluation


def job_spec(model: str | None) -> dict[str, Any]:
    """Return the job spec of the packaged recipe. `model`: another teacher, of which half the layers are skipped."""
    spec: dict[str, Any] = yaml.safe_load(recipe(RECIPE).read_text(encoding="utf-8"))
    if model is not None:
        path = Path(model).expanduser()
        # The job runs in another directory than this process.
        spec["model"] = {**spec.get("model", {}), "name_or_path": str(path.resolve()) if path.exists() else model}
        swiftkv = spec.get("swiftkv", {})
        swiftkv.pop("num_key_value_layers", None)
        spec["swiftkv"] = {**swiftkv, "prefill_reduction": 0.5}
    return suited_to_cpu(spec)


def demo_settings(home: Path) -> Settings:
    """Return settings of a stack of its own: without the operator's database, store and files of keys."""
    files = dict.fromkeys(OPERATOR_FILES)
    return Settings.model_validate({"home": home, "database_url": None, "storage_uri": None, **files})


def claim_home(stack: Stack, *, keep: bool) -> None:
    """Prepare the stack's home, emptied of an earlier demo unless `keep`. Raises `InvalidInputError` for a non-empty
    directory that no demo made, and for a kept one with API keys."""
    mark = stack.home / _HOME_MARK
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
        elif (keys := default_keys_file(stack.home)).exists():
            raise InvalidInputError.of("home", str(stack.home), f"; the demo runs without API keys: move {keys} away")
    stack.home.mkdir(parents=True, exist_ok=True)
    mark.touch()


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP (closed terminal) into `SystemExit`, so that what was started is stopped."""

    def leave(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def step(console: Console, title: str) -> None:
    """Print the heading of a part of the demo."""
    console.rule(f"[bold]{escape(title)}", align="left")
