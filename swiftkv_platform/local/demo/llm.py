"""End-to-end demo on a real LLM: distill SmolLM2-135M-Instruct on its own answers, deploy it, and ask teacher and
student. An interrupted demo continues where it stopped.

Uses only public interfaces (stack and client), so any user can do the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.markup import escape

from swiftkv_platform.client import Client, Job
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.local.demo.report import build_report, print_report, write_report
from swiftkv_platform.local.demo.run import (
    DemoOptions,
    Observed,
    claim_home,
    demo_settings,
    download_evaluation,
    follow_job,
    signals_as_exit,
    step,
)
from swiftkv_platform.local.stack import Stack, StackOptions
from swiftkv_platform.sources.recipes import recipe, suited_to_cpu
from swiftkv_platform.sources.teacher_config import builtin_teacher
from swiftkv_platform.specs import REAL_TEACHER

NAMES = ("smollm2", REAL_TEACHER)
"""Values of `--model` that run this demo."""
RECIPE = "builtin-smollm2-135m-demo"
QUESTIONS = (
    "What is the capital of Japan?",  # for France the first word is a near tie, which rounding decides per machine
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning to swim.",
)
_ANSWER_TOKENS = 96
_ASKED_WITHIN_S = 300.0
_SPEC_LABEL = "demo-spec"


def llm_spec(*, short: bool = False) -> dict[str, Any]:
    """Return the recipe's job spec. `short`: run every part within a few minutes, too short to learn anything."""
    spec = suited_to_cpu(yaml.safe_load(recipe(RECIPE).read_text(encoding="utf-8")))
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


def run_llm_demo(options: DemoOptions, console: Console, *, short: bool = False) -> dict[str, Any]:
    """Run or continue the demo and return its report. Stops the stack at the end, except after a success with
    `keep_running`. Raises `ModelError` if the package with the model is not installed (the message has the command),
    and `SwiftKVError` if a step failed; the output says where the logs are."""
    builtin_teacher(REAL_TEACHER)  # raises before anything is started
    home = options.home.expanduser().resolve()
    stack = Stack(demo_settings(home))
    claim_home(stack, keep=True)
    kept = False
    with signals_as_exit():
        try:
            report = _run(options, llm_spec(short=short), stack, console)
            kept = options.keep_running
        finally:
            if kept:
                console.print(f"Still running; SWIFTKV_HOME={escape(str(home))} swiftkv down stops it.", soft_wrap=True)
            else:
                step(console, "Stopping")
                stack.down()
                console.print(
                    f"Logs and checkpoints are in {escape(str(home))}; the same command continues from there."
                )
    return report


def _run(options: DemoOptions, spec: dict[str, Any], stack: Stack, console: Console) -> dict[str, Any]:
    observed = Observed(prompt=QUESTIONS[0], dtype=spec["model"].get("dtype"))
    with observed.phase("total"):
        step(console, "Starting Ray and the control plane")
        with observed.phase("up"):
            state = stack.up(StackOptions(port=0), lambda line: console.print(f"  {escape(line)}", highlight=False))
        with Client(state.url, serve_url=state.serve_url) as client:
            job = _job(client, spec, console)
            step(console, f"Distilling {REAL_TEACHER} (job {job.id}, {job.status})")
            job = follow_job(client, job, observed, console)
            evaluation = download_evaluation(client, job)
            talks = _talk(client, job, observed, console)
    report = build_report(evaluation, {**vars(observed), "chat": talks})
    write_report(report, options.output)
    step(console, "Report")
    print_report(report, console)
    console.print(f"Report: {options.output}", highlight=False, soft_wrap=True)
    console.print(f"{observed.seconds['total']:.0f} s in all", highlight=False)
    return report


def _job(client: Client, spec: dict[str, Any], console: Console) -> Job:
    """Return the job that an earlier run created from this spec, resumed if paused, else a new one."""
    before = [job for job in client.jobs.list(metadata=spec["metadata"]) if job.status not in ("failed", "cancelled")]
    if not before:
        return client.jobs.create(spec)
    console.print(f"Continuing with job {before[0].id}, which is {before[0].status}.", highlight=False)
    return client.jobs.resume(before[0].id) if before[0].status == "paused" else before[0]


def _talk(client: Client, job: Job, observed: Observed, console: Console) -> list[dict[str, str]]:
    """Ask a deployed artifact the same questions as student and as teacher, and print both answers."""
    step(console, f"Deploying {job.distilled_model}")
    for stale in client.deployments.list():  # left by an interrupted run
        client.deployments.delete(stale.id)
    with observed.phase("deploy"):
        deployment = client.deployments.create(job.distilled_model)
        observed.deployment_id = deployment.id
        deployment = client.deployments.wait_ready(deployment.id)
    step(console, "Asking student and teacher")
    with observed.phase("chat"):
        students = _answers(deployment.url, deployment.model)
        client.deployments.update(deployment.id, engine={"swiftkv": False})
        deployment = client.deployments.wait_ready(deployment.id)
        teachers = _answers(deployment.url, deployment.model)
    talks = [
        {"question": question, "teacher": teacher, "student": student}
        for question, teacher, student in zip(QUESTIONS, teachers, students, strict=True)
    ]
    observed.generated_text = students[0]
    for talk in talks:
        for who, text in talk.items():
            console.print(f"[bold]{who:>9}[/] {escape(text.strip())}", highlight=False, soft_wrap=True)
    return talks


def _answers(url: str | None, model: str) -> Sequence[str]:
    """Return greedy answers to `QUESTIONS` from `/v1/chat/completions`."""
    texts = []
    for question in QUESTIONS:
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": _ANSWER_TOKENS,
                "temperature": 0.0,
            },
            timeout=_ASKED_WITHIN_S,
        )
        if answer.is_error:
            raise SwiftKVError(f"{url}/v1/chat/completions answered {answer.status_code}: {answer.text[:500]}")
        texts.append(str(answer.json()["choices"][0]["message"]["content"]))
    return texts
