"""lm-evaluation-harness: log-probabilities of prompts, and text, by `local-completions` and its chat form."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from tests.outside.judges.conftest import MODEL, Deployment, run

TASKS = Path(__file__).parent / "tasks"
NUM_ROWS = len((TASKS / "facts.jsonl").read_text().splitlines())


def evaluate(model: str, arguments: dict[str, Any], tasks: list[str], output: Path, *flags: str) -> dict[str, Any]:
    """Return the samples of each task."""
    given = ",".join(f"{name}={value}" for name, value in {"model": MODEL, "max_retries": 1, **arguments}.items())
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", given, "--tasks", ",".join(tasks)]
    command += ["--include_path", str(TASKS), "--output_path", str(output), "--log_samples", *flags]
    run(command, cwd=TASKS, environment={"HF_HOME": str(output / "home")})  # the task's data is looked for in `cwd`
    samples = {}
    for task in tasks:
        [file] = output.rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples[task]) == NUM_ROWS
    return samples


def test_local_completions(native: Deployment, tmp_path: Path) -> None:
    url, tasks = f"{native.openai_url}/completions", ["judged_choice", "judged_text", "judged_words"]
    arguments = {"base_url": url, "tokenizer": native.tokenizer, "num_concurrent": 2}
    samples = evaluate("local-completions", arguments, tasks, tmp_path)
    for sample in samples["judged_choice"]:
        log_probabilities = [float(answer[0][0]) for answer in sample["resps"]]
        assert all(math.isfinite(value) and value < 0 for value in log_probabilities)
        assert len(set(log_probabilities)) == 2, "the two choices have different log-probabilities"
    assert all(math.isfinite(sample["bits_per_byte"][0]) for sample in samples["judged_text"])
    assert all(sample["resps"][0][0] for sample in samples["judged_words"])


def test_local_chat_completions(native: Deployment, tmp_path: Path) -> None:
    arguments = {"base_url": f"{native.openai_url}/chat/completions", "num_concurrent": 2}
    samples = evaluate("local-chat-completions", arguments, ["judged_words"], tmp_path, "--apply_chat_template")
    assert all(sample["resps"][0][0] for sample in samples["judged_words"])
