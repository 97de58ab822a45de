"""`vllm bench serve`: streamed completions and chats, on this project's engine and on vLLM behind the same routes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.outside.judges.conftest import MODEL, Deployment, run

NUM_PROMPTS = 24
MAIN = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""Runs `vllm bench serve` without its command, which needs a distribution named `vllm`; CPU builds have another
name."""


@pytest.mark.parametrize(("backend", "route"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_every_request_completes(
    request: pytest.FixtureRequest, vllm_python: str, tmp_path: Path, engine: str, backend: str, route: str
) -> None:
    deployment: Deployment = request.getfixturevalue(engine)
    options = {
        "backend": backend,
        "base-url": deployment.url,
        "endpoint": route,
        "model": MODEL,
        "tokenizer": deployment.tokenizer,
        "dataset-name": "random",
        "random-input-len": 64,
        "random-output-len": 16,
        "num-prompts": NUM_PROMPTS,
        "max-concurrency": 4,
        "result-dir": tmp_path,
        "result-filename": "result.json",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    arguments += ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    output = run([vllm_python, "-c", MAIN, *arguments], cwd=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [error for error in result["errors"] if error] == [], output[-4000:]
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), output[-4000:]
    assert result["total_output_tokens"] == NUM_PROMPTS * 16
