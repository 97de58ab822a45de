"""Whole attempts on a real Ray: the data they prepare, the jobs they refuse, and the files they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.contract.row_results import load_rows
from swiftkv_platform.storage.object_store import open_store
from tests.support.distill_jobs import JOB, ONE_WORKER, events, job_spec
from tests.support.otlp_receiver import otlp_receiver

pytestmark = [pytest.mark.integration("whole attempts"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("section", "code", "field"),
    [
        ({"data": {"sources": [{"name_or_path": "{columnless}"}]}}, "data_error", "data.sources[0]"),
        pytest.param(
            *({"swiftkv": {"num_key_value_layers": 9}}, "invalid_input", "swiftkv.num_key_value_layers"),
            marks=pytest.mark.soak("an attempt more"),
        ),
        pytest.param(
            *({"model": {"name_or_path": "{nowhere}"}}, "model_error", "model.name_or_path"),
            marks=pytest.mark.soak("an attempt more"),
        ),
    ],
)
def test_what_only_the_cluster_can_know_is_an_error_event(
    cluster: str,
    tiny_teacher: Path,
    corpus: Path,
    tmp_path: Path,
    section: dict[str, Any],
    code: str,
    field: str,
) -> None:
    from swiftkv_platform.jobs.distill import run_attempt

    columnless = tmp_path / "rows.jsonl"
    columnless.write_text('{"nothing": 1}\n')
    filled = json.loads(
        json.dumps(section).replace("{columnless}", str(columnless)).replace("{nowhere}", str(tmp_path / "nowhere"))
    )
    store = open_store(str(tmp_path / "store"))
    spec = job_spec(tiny_teacher, corpus, max_steps=1, **filled)

    failure = run_attempt(store, AttemptRequest(job_id=JOB, attempt=1, spec=spec, run_id="run"))

    error = events(store)[-1]
    assert failure is not None
    assert (error.type, error.level) == ("error", "error")
    assert error.data["code"] == failure.code == code
    assert error.data["field"].startswith(field)
    assert error.data["retryable"] is False


def test_a_job_without_a_control_plane(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    """`run_job_locally` in a separate process starts a Ray, exports its spans, and leaves only the artifact."""
    spec_file, output = tmp_path / "spec.json", tmp_path / "output"
    spec = job_spec(tiny_teacher, corpus, max_steps=2, resources=ONE_WORKER).model_dump(mode="json")
    prompts = {"name_or_path": str(corpus), "sample_count": 3, "complete": {"max_tokens": 4, "prompt_tokens": 8}}
    spec["data"]["sources"].append(prompts)
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "def add_1(", "completion": "x"}\n{"prompt": "return", "completion": "y"}\n')
    rows = {"name": "own", "metric": "contains", "max_tokens": 4, "source": {"name_or_path": str(own)}}
    spec["evaluation"]["rows"] = [rows]
    spec_file.write_text(json.dumps(spec))
    program = """
import sys
from pathlib import Path
from swiftkv_platform.local.training import run_job_locally
from swiftkv_platform.specs import load_spec
def say(event):
    print(event.type, event.message, sep="\\t", flush=True)
run_job_locally(load_spec(Path(sys.argv[1])), Path(sys.argv[2]), on_event=say)
"""
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()

    with otlp_receiver() as receiver:
        done = subprocess.run(
            [sys.executable, "-c", program, str(spec_file), str(output)],
            env={**environment, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url},
            capture_output=True,
            text=True,
        )

    assert done.returncode == 0, done.stderr
    said = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    kinds = [kind for kind, _ in said]
    wrote = next(message.split()[3] for _, message in said if message.startswith("the teacher generated "))
    assert 3 <= int(wrote) <= 12
    assert any(message.startswith("data.sources[1] ") and f"{wrote} tokens written" in message for _, message in said)
    assert kinds[0] == "status"
    assert kinds[-1] == "artifact"
    assert {"metrics", "checkpoint"} <= set(kinds)
    (task,) = json.loads((output / "evaluation.json").read_text())["tasks"]
    results = load_rows((output / "rows" / f"{task['row_results']}.jsonl").read_bytes())
    assert [(row.prompt, row.expected) for row in results] == [("def add_1(", "x"), ("return", "y")]
    assert not any(name.startswith("rows/") for name in json.loads((output / "manifest.json").read_text())["files"])
    assert not list((tmp_path / "tmp").glob("distill-*"))

    spans = receiver.by_name()
    phases = ["prepare", "calibrate", "first step", "evaluate", "publish"]
    assert spans.keys() == {"attempt", *phases}
    attempt = spans["attempt"]
    assert {(span.trace_id, span.is_error) for span in spans.values()} == {(attempt.trace_id, False)}
    assert {spans[phase].parent_id for phase in phases} == {attempt.span_id}
    times = [attempt.began, *(spans[phase].began for phase in phases), spans["publish"].ended, attempt.ended]
    assert times == sorted(times)
    assert spans["calibrate"].ended <= spans["first step"].began
    assert spans["publish"].ended <= spans["evaluate"].ended, "publishing is part of the evaluation phase"
