"""guidellm: streams of completions and chats with usage in every event, none of which may fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.outside.judges.conftest import MODEL, Deployment, run

NUM_REQUESTS = 12
NUM_STREAMS = 4


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_no_request_fails(native: Deployment, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": {"kind": "openai_http", "target": native.url, "model": MODEL, "request_format": route},
        "tokenizer": {"kind": "huggingface_auto", "model": str(native.tokenizer)},
        "data": {"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": 16},
        "profile": {"kind": "concurrent", "streams": [NUM_STREAMS]},
        "constraint": {"kind": "max_requests", "count": NUM_REQUESTS},
        "output": {"kind": "json", "path": str(report)},
    }
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", json.dumps(value))]
    run([sys.executable, "-m", "guidellm", "run", "--disable-console-interactive", *arguments], cwd=tmp_path)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests, counted = benchmark["requests"], benchmark["scheduler_state"]
    assert counted["created_requests"] == NUM_REQUESTS
    assert {request["info"]["error"] for request in requests["errored"]} == set()
    # guidellm exits without waiting for its own processes to report the last requests.
    assert len(requests["successful"]) + counted["processing_requests"] == NUM_REQUESTS
    assert counted["processing_requests"] < NUM_STREAMS
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {16}
