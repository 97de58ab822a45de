"""Output for people: units and sentences, where `--json` has keys and numbers."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from swiftkv_platform.cli import jobs as jobs_module
from swiftkv_platform.cli.app import app
from swiftkv_platform.cli.estimates import describe_estimate
from swiftkv_platform.cli.output import format_local_time
from swiftkv_platform.client import Resource
from swiftkv_platform.local import formats as units
from swiftkv_platform.specs import JobSpec
from tests.support.fakes.scripted_server import Answer, Request, Script, event_stream, json_answer, list_answer
from tests.unit.cli.conftest import Run, job_row

QUICKSTART = Path("docs/quickstart.md")

MIB, GIB = 1 << 20, 1 << 30

ESTIMATE: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_key_value_layers": 6,
    "num_kv_cache_layers": 9,
    "prefill_flops_ratio": 0.5195,
    "kv_bytes_per_token": 3456.0,
    "kv_bytes_ratio": 0.75,
    "parameters": 5_989_248,
    "trained_parameters": 331_968,
    "flops_per_token": 36_126_720.0,
    "memory_per_worker": 129_704_832,
    "process_memory": 744_488_960,
    "max_tokens": 819_200,
    "total_flops": 29_595_009_024_000.0,
    "seconds": 250.0,
    "speed_source": "job_7",
    "cost": 1.5,
    "sources": [
        {"name_or_path": "a.jsonl", "num_files": 1, "num_bytes": 3 * MIB, "formats": ["text", "chat"]},
        {"name_or_path": "org/set", "num_files": None, "num_bytes": None, "formats": []},
    ],
}

SPEC: dict[str, Any] = {"name": "tiny", "training": {"max_steps": 100}, "data": {"max_length": 512}}


def lines(result: Result) -> dict[str, str]:
    """Lines printed by `print_fields`, by field name."""
    assert result.exit_code == 0, result.output
    pairs = (line.split("  ", 1) for line in result.stdout.splitlines() if "  " in line)
    return {name: text.strip() for name, text in pairs}


def described(
    machine_bytes: int | None = None, *, spec: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    estimate = Resource.model_validate({**ESTIMATE, **changes})
    return describe_estimate(estimate, JobSpec.model_validate({**SPEC, **(spec or {})}), machine_bytes)


def test_an_estimate_says_what_is_made_and_taken() -> None:
    assert described(16 * GIB) == {
        "scope": None,
        "student": "6 of 12 layers keep their own KV projections; the KV cache has 9 layers",
        "prefill": "51.9% of the teacher's FLOPs for prompts of 512 tokens",
        "KV cache": "3.38 KiB per token in bfloat16, 75.0% of the teacher's",
        "parameters": "5.99 million, 331,968 (5.5%) trainable",
        "training": "100 steps, 819,200 tokens: 29.6 TFLOPs, 36.1 MFLOPs per token",
        "memory": "124 MiB per worker plus 710 MiB process overhead; "
        "1.63 GiB for 2 workers, 16 GiB on this machine: fits",
        "time": "4 min 10 s from start to finish, at the speed of job_7",
        "cost": "1.50 at the operator's prices",
        "data": "a.jsonl: 1 file, 3 MiB, rows of text or chat; org/set: readable only by workers",
    }


def test_memory_that_does_not_fit_says_what_would_do() -> None:
    on_cpus = described(GIB)["memory"]
    assert on_cpus.endswith(
        ", 1 GiB on this machine: does not fit; reduce the number of workers or training.micro_batch_size"
    )
    on_gpus = {"resources": {"gpus_per_worker": 1, "accelerator_type": "L4"}}
    assert described(spec=on_gpus)["memory"] == "124 MiB per worker, 22.4 GiB on one L4: fits"
    too_large = described(spec=on_gpus, memory_per_worker=30 * GIB)["memory"]
    assert too_large.startswith("30 GiB per worker, 22.4 GiB on one L4: does not fit; add workers")
    assert described(spec={"resources": {"gpus_per_worker": 1}})["memory"] == "124 MiB per worker of GPU memory"
    assert described(None)["memory"].endswith("1.63 GiB for 2 workers")


def test_what_is_not_known_is_said_or_left_out() -> None:
    unmeasured = described(seconds=None, cost=None, max_tokens=None, total_flops=None)
    assert unmeasured["time"] == "no estimate: no similar job has finished"
    assert unmeasured["training"] == "36.1 MFLOPs per token; the number of tokens depends on data and epochs"
    assert unmeasured["cost"] is None
    of_hub = describe_estimate(Resource.model_validate({"sources": []}), JobSpec.model_validate(SPEC), 16 * GIB)
    assert set(of_hub.values()) == {None, ""}


def test_validate_compares_with_the_memory_of_this_machine(run: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC))
    script.on("POST", "/jobs/validate", json_answer(ESTIMATE))
    result = run("jobs", "validate", "-f", str(tmp_path / "spec.yaml"))
    here = units.format_size(psutil.virtual_memory().total)
    assert lines(result)["memory"].endswith(f", {here} on this machine: fits")
    assert "129704832" not in result.stdout
    printed = json.loads(run("jobs", "validate", "-f", str(tmp_path / "spec.yaml"), "--json").stdout)
    assert printed == ESTIMATE


def test_the_quickstart_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = QUICKSTART.read_text(encoding="utf-8")
    spec, shown = text.split("```yaml\n# spec.yaml\n")[1], text.split("$ swiftkv jobs validate -f spec.yaml\n")[1]
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(spec.partition("```")[0])
    result = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)}).invoke(app, ["jobs", "validate", "-f", "spec.yaml"])
    documented = shown.partition("$ swiftkv jobs submit")[0].splitlines()
    of_any_machine = [line for line in documented if not line.startswith("memory")]
    assert len(documented) == len(of_any_machine) + 1 == 9
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert [line for line in printed if not line.startswith("memory")][: len(of_any_machine)] == of_any_machine
    memory = next(line for line in documented if line.startswith("memory"))
    assert memory.rpartition(", ")[0] in result.stdout


JOB = job_row()


def test_a_job_that_runs(run: Run, script: Script) -> None:
    progress = {"step": 40, "total_steps": 100, "tokens": 327_680, "percent": 40.0, "seconds_remaining": 130}
    row = {**JOB, "status": "running", "progress": progress, "cost": 0.5, "estimated_cost": 1.25}
    script.on("GET", "/jobs/job_1", json_answer(row))
    shown = lines(run("jobs", "get", "job_1"))
    assert shown["steps"] == "40/100, 327,680 tokens, 2 min 10 s left"
    assert shown["cost"] == "0.50 (1.25 estimated in total)"


def test_a_job_says_how_far_its_phase_is(run: Run, script: Script) -> None:
    layers = {"part": "layers", "done": 3, "total": 32, "seconds_remaining": 130}
    calibrates = {**JOB, "status": "running", "phase": "calibrate", "phase_progress": layers}
    stored = {"part": "bytes", "done": 1 << 20, "total": 3 << 30, "seconds_remaining": None}
    stores = {**JOB, "status": "evaluating", "phase": "publish", "phase_progress": stored}
    script.on("GET", "/jobs/job_1", json_answer(calibrates), json_answer(stores))
    script.on("GET", "/jobs", list_answer([calibrates, {**calibrates, "phase_progress": None}]))
    told = "calibrate, layers 3 of 32, 2 min 10 s left"
    assert [lines(run("jobs", "get", "job_1"))["phase"] for _ in range(2)] == [told, "publish, bytes 1 MiB of 3 GiB"]
    assert run("jobs", "list").stdout.replace("\n", " ").count("running, calibrate") == 2


def test_a_job_that_waits_for_the_cluster(run: Run, script: Script) -> None:
    reason = {"code": "waiting_for_resources", "message": "waiting for 1 worker with 1 CPU and 4 GPUs"}
    row = {**JOB, "status": "queued", "status_reason": reason, "queue_place": 3, "waiting_since": 60}
    script.on("GET", "/jobs/job_1", json_answer(row))
    script.on("GET", "/jobs", list_answer([row, {**row, "waiting_since": None}]))
    shown = lines(run("jobs", "get", "job_1"))
    assert shown["reason"] == "waiting_for_resources: waiting for 1 worker with 1 CPU and 4 GPUs"
    assert shown["queue"] == f"queue position 3, waiting for resources since {format_local_time(60)}"
    listed = run("jobs", "list").stdout
    assert listed.count("queued, queue position 3") == 2
    ended = {**JOB, "status": "cancelled"}
    script.on("GET", "/jobs/job_1", json_answer(row), json_answer(ended))
    script.on("GET", "/jobs/job_1/events", event_stream(), list_answer([]))
    watched = run("jobs", "watch", "job_1").stdout
    assert "queue position 3, waiting for resources since" in watched
    assert reason["message"] in watched


def test_a_deployment_that_ray_serve_does_not_report(run: Run, script: Script) -> None:
    row = {"id": "dep_1", "model": "mdl_1", "status": "running", "replicas": 2, "created_at": 0, "unknown_since": 60}
    script.on("GET", "/deployments", list_answer([row, {**row, "id": "dep_2", "unknown_since": None}]))
    script.on("GET", "/deployments/dep_1", json_answer(row))
    unknown = f"unknown since {format_local_time(60)} (last known: running)"
    assert lines(run("deployments", "get", "dep_1"))["status"] == unknown
    listed = " ".join(run("deployments", "list").stdout.split())
    assert listed.count("unknown since") == 1
    assert "dep_2 mdl_1 running" in listed


def test_a_watched_job_says_when_what_it_waits_for_has_changed(
    run: Run, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_POLL_INTERVAL_S", 0.001)
    slot, away = "1 job runs, and there is 1 slot", "Ray at http://ray does not answer"
    reasons = [slot, slot, f"{slot}; starts in 9 s", f"{slot}; starts in 4.5 s", away, away, slot]
    rows = [{**JOB, "status": "queued", "status_reason": {"code": "", "message": reason}} for reason in reasons]
    rows += [{**JOB, "status": "running", "phase": phase} for phase in (None, "prepare", "prepare", "train")]
    script.on("GET", "/jobs/job_1", *map(json_answer, [*rows, {**JOB, "status": "cancelled"}]))

    def ends(_: Request) -> Answer:
        """A stream that is silent while the job waits."""
        while len(script.sent("GET", "/jobs/job_1")) <= len(rows):
            time.sleep(0.001)
        return event_stream()

    script.on("GET", "/jobs/job_1/events", ends, list_answer([]))
    queued = [f"queued: {reason}" for reason in (slot, f"{slot}; starts in 9 s", away, slot)]
    shown = run("jobs", "watch", "job_1").stdout.splitlines()
    assert shown[: len(queued) + 2] == [*queued, "phase: prepare", "phase: train"]


def test_a_job_that_has_failed_leads_with_cause_and_cure(run: Run, script: Script) -> None:
    error = {"code": "out_of_memory", "message": "a worker ran out of memory", "cure": "data.max_length is 8: use 4."}
    row = {**JOB, "status": "failed", "error": error, "status_reason": {"code": "out_of_memory", "message": "again"}}
    script.on("GET", "/jobs/job_1", *[json_answer(row)] * 3)
    script.on("GET", "/jobs/job_1/events", event_stream(), list_answer([]))
    for command in ("get", "watch"):
        first, second, *rest = run("jobs", command, "job_1").stdout.splitlines()
        assert first.split("  ", 1)[1].strip() == "out_of_memory: a worker ran out of memory"
        assert second.split("  ", 1)[1].strip() == "data.max_length is 8: use 4."
        assert not any("again" in line for line in rest)


def test_a_job_that_has_succeeded(run: Run, script: Script) -> None:
    report = {
        "teacher": {"perplexity": 13.456},
        "distilled": {"perplexity": 15.62, "kl": 0.1731, "top1_agreement": 0.777},
    }
    row = {**JOB, "status": "succeeded", "started_at": 100, "finished_at": 350, "cost": 1.25, "estimated_cost": 9.0}
    tracking = {"provider": "wandb", "run_id": "job_1", "mode": "offline", "url": None}
    script.on("GET", "/jobs/job_1", json_answer({**row, "result": report, "tracking": tracking}))
    shown = lines(run("jobs", "get", "job_1"))
    assert shown["finished"].endswith(", after 4 min 10 s")
    assert shown["quality"] == "perplexity 15.62 (teacher 13.46), KL 0.173 nats, top-1 agreement 77.7%"
    assert shown["tracking"] == "wandb run job_1, offline"
    assert shown["cost"] == "1.25"
    assert json.loads(run("jobs", "get", "job_1", "--json").stdout)["result"] == report


def test_the_quota(run: Run, script: Script) -> None:
    quota = {
        "tenant": "research",
        "weight": 2.0,
        "max_queued_jobs": 100,
        "max_running_jobs": 1,
        "max_gpus": 32.0,
        "queued_jobs": 3,
        "running_jobs": 1,
        "replicas": 1,
        "gpus": 9.0,
        "cpus": 4.5,
        "stored_bytes": 1500,
        "max_stored_bytes": 3_000_000,
        "stored_jobs": 12,
        "max_stored_jobs": 100_000,
        "deployments": 2,
        "max_deployments": 100,
        "files": 3,
        "imported_models": 0,
        "aliases": 0,
        "pending_deliveries": 0,
        "held_by_jobs": {"gpus": 8.0, "cpus": 4.5},
        "held_by_deployments": {"gpus": 1.0, "cpus": 0.0},
    }
    script.on("GET", "/quota", json_answer(quota))
    assert lines(run("quota")) == {
        "tenant": "research, weight 2 in the queue",
        "queued": "3 of 100 jobs",
        "running": "1 of 1 job",
        "GPUs": "9 of 32 GPUs; 8 by jobs and 1 by deployments",
        "CPUs": "4.5 CPU cores, no limit; 4.5 by jobs",
        "replicas": "1 replica, no limit",
        "stored jobs": "12 of 100,000",
        "deployments": "2 of 100",
        "files": "3, no limit",
        "imported models": "0, no limit",
        "aliases": "0, no limit",
        "pending webhooks": "0, no limit",
        "stored": "1.46 KiB of 2.86 MiB",
        "cluster": "unknown: Ray is unavailable or lists no nodes",
    }
    use = {"gpus": 12.0, "total_gpus": 16.0, "cpus": 6.5, "total_cpus": 64.0}
    script.on("GET", "/quota", json_answer({**quota, "cluster": use}))
    assert lines(run("quota"))["cluster"] == "12 of 16 GPUs and 6.5 of 64 CPU cores in use by all tenants"
    assert json.loads(run("quota", "--json").stdout)["max_gpus"] == 32.0


DEPLOYMENT: dict[str, Any] = {
    "id": "dep_1",
    "object": "deployment",
    "model": "mdl_1",
    "alias": "production",
    "status": "running",
    "message": "",
    "url": "http://127.0.0.1:8001/chat",
    "replicas": 2,
    "load_seconds": {"fetch": 1.5, "load": 2.0, "check": 0.254},
    "min_replicas": 1,
    "max_replicas": 4,
    "target_ongoing_requests": 8.0,
    "upscale_delay_s": 10.0,
    "downscale_delay_s": 300.0,
    "engine": {"max_num_seqs": 8, "dtype": "bfloat16"},
    "candidate": {"model": "mdl_2", "share": 0.1},
    "created_at": None,
    "version": 3,
}


def test_a_deployment(run: Run, script: Script) -> None:
    script.on("GET", "/deployments/dep_1", json_answer(DEPLOYMENT))
    assert lines(run("deployments", "get", "dep_1")) == {
        "deployment": "dep_1",
        "model": "mdl_1 (alias production)",
        "status": "running",
        "url": "http://127.0.0.1:8001/chat",
        "replicas": "2 (min 1, max 4)",
        "cold start": "3.75 s (fetch 1.50, load 2.00, check 0.25)",
        "scaling": "target 8 concurrent requests per replica, scale up after 10 s, down after 5 min",
        "engine": "max_num_seqs 8, dtype bfloat16",
        "candidate": "mdl_2, 10.0% of requests",
        "version": "3",
    }
    assert json.loads(run("deployments", "get", "dep_1", "--json").stdout) == DEPLOYMENT


def test_the_list_of_deployments_has_their_replicas(run: Run, script: Script) -> None:
    script.on("GET", "/deployments", list_answer([DEPLOYMENT, {**DEPLOYMENT, "id": "dep_2", "min_replicas": 4}]))
    rows = [line.split("  ") for line in run("deployments", "list").stdout.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[3] for row in cells] == ["replicas", "2 (min 1, max 4)", "2 (min 4, max 4)"]


def test_units() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "0.977 KiB", 129_704_832: "124 MiB", 16 * GIB: "16 GiB"}
    assert {number: units.format_size(number) for number in sizes} == sizes
    assert units.format_size(1023.6 * MIB) == "1 GiB"
    durations = {0.2: "0 s", 59: "59 s", 60: "1 min", 250: "4 min 10 s", 3601: "1 h", 90_000: "1 d 1 h"}
    assert {seconds: units.format_duration(seconds) for seconds in durations} == durations
    counts = {12: "12", 331_968: "331,968", 5_989_248: "5.99 million", 8.43e9: "8.43 billion"}
    assert {number: units.format_count(number) for number in counts} == counts
    assert units.format_flops(29.6e12) == "29.6 TFLOPs"
    assert [units.pluralize(number, "step") for number in (1, 2)] == ["1 step", "2 steps"]


def test_sizes_of_files_and_checkpoints(run: Run, script: Script) -> None:
    weights = {"path": "model.safetensors", "size": 24 * MIB, "sha256": "f"}
    checkpoint = {"id": "c", "attempt": 1, "step": 25, "key": "jobs/job_1", "size": 3 * GIB, "sha256": "f"}
    model = {"id": "mdl_1", "name": "tiny", "job_id": "job_1", "created_at": 1, "size": 24 * MIB}
    script.on("GET", "/jobs/job_1/artifacts", list_answer([weights]))
    script.on("GET", "/models/mdl_1", json_answer(model))
    assert "24 MiB" in run("jobs", "artifacts", "job_1").stdout
    measured = {**checkpoint, "held_out_kl": 0.17314, "distilled_model": "mdl_1"}
    script.on("GET", "/jobs/job_1/checkpoints", list_answer([checkpoint]), list_answer([measured]))
    assert "3 GiB" in run("jobs", "checkpoints", "job_1").stdout
    assert {"0.1731", "mdl_1"} < {*run("jobs", "checkpoints", "job_1").stdout.split()}
    assert "24 MiB" in run("models", "get", "mdl_1").stdout
    assert json.loads(run("jobs", "artifacts", "job_1", "--json").stdout)[0]["size"] == 24 * MIB


def test_a_plan_says_in_a_sentence_what_a_student_saves() -> None:
    result = CliRunner().invoke(app, ["plan", "builtin:python-5m", "-g", "1", "-g", "2", "-s", "2048"])
    assert result.stdout.splitlines()[-2:] == [
        "l = 6, g = 1: prefill takes 52.3% of the FLOPs; KV cache per prompt: unchanged (9 MiB).",
        "l = 6, g = 2: prefill takes 51.2% of the FLOPs; KV cache per prompt: 6.75 MiB instead of 9 MiB.",
    ]
