"""KL of students on captured traffic: trained on it, and on other text.

    python -m benchmarks.traffic [--url http://127.0.0.1:8000] [--seeds 3] [--output traffic.json]

Needs a control plane with Ray (`swiftkv up`). For each seed, a student of the built-in teacher is trained on the
standard library's source and deployed. It captures requests that continue passages of English from the descriptions and
licenses of installed packages; a second job continues from the served student on them, and measures both students on a
fifth of the conversations that it does not train on. The report has the KL of each, and by how much it fell.
"""

from __future__ import annotations

import json
import random
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from statistics import mean
from typing import Any

import httpx

from benchmarks.common import describe_conditions, make_benchmark_parser, write_report
from swiftkv_platform.client import Client, Job

TEACHER = {"name_or_path": "builtin:python-5m", "dtype": "float32"}
STUDENT = {"model": TEACHER, "swiftkv": {"num_key_value_layers": 6, "key_value_group_size": 1}}
COMMON: dict[str, Any] = {
    "resources": {"num_workers": 1},
    "tracking": {"wandb": {"mode": "disabled"}},
}
_PROMPT_CHARACTERS = 400


def main() -> None:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1600, help="per seed")
    parser.add_argument("--other-steps", type=int, default=100, help="steps on other text")
    parser.add_argument("--steps", type=int, default=400, help="steps on the traffic")
    args = parser.parse_args()
    with Client(args.url) as client:
        runs = [measure_seed(client, args, seed) for seed in range(args.seeds)]
    reductions = [run["reduction"] for run in runs]
    report = {"conditions": describe_conditions(args), "runs": runs, "mean_reduction": mean(reductions)}
    print(json.dumps({"runs": runs, "mean_reduction": report["mean_reduction"]}, indent=1))
    write_report(report, args.output)


def make_training(steps: int, seed: int) -> dict[str, Any]:
    return {"max_steps": steps, "batch_size": 16, "micro_batch_size": 4, "seed": seed}


def measure_seed(client: Client, args: Namespace, seed: int) -> dict[str, float]:
    # 1. a student of other text
    first = run_job(
        client,
        {
            **COMMON,
            **STUDENT,
            "name": f"other-text-{seed}",
            "data": {"max_length": 256, "sources": [{"name_or_path": "builtin:python-stdlib"}]},
            "training": make_training(args.other_steps, seed),
        },
    )
    # 2. its traffic
    model, route = str(first.distilled_model), f"/traffic-{seed}"
    deployment = client.deployments.create(model, route_prefix=route, capture={"share": 1.0, "redact": []})
    client.deployments.wait_ready(deployment.id)
    send_requests(deployment.url, args.requests, seed)
    # 3. a student that continues from it on the traffic
    source = {"name_or_path": f"traffic:{deployment.id}", "since": "1h"}
    second = run_job(
        client,
        {
            **COMMON,
            "name": f"traffic-{seed}",
            "data": {"max_length": 256, "validation_fraction": 0.2, "sources": [source]},
            "training": {**make_training(args.steps, seed), "from": deployment.id},
            "evaluation": {"min_kl_reduction": -1.0},
        },
    )
    client.deployments.delete(deployment.id)
    report = client.models.get(str(second.distilled_model)).metrics
    [gate] = [gate for gate in report["gates"] if gate["field"] == "evaluation.min_kl_reduction"]
    before, after = report["parent"]["kl"], report["distilled"]["kl"]
    low, high = gate["interval"]
    return {"kl_other_text": before, "kl_traffic": after, "reduction": gate["value"], "low": low, "high": high}


def run_job(client: Client, spec: dict[str, Any]) -> Job:
    job = client.jobs.wait(client.jobs.create(spec).id)
    assert job.status == "succeeded", job.error
    return job


def send_requests(url: str, number: int, seed: int) -> None:
    """Send prompts that end within a text, a few at a time. The answers end with a sentence."""
    prompts = random.Random(seed).sample(sorted(set(iterate_prompts())), number)

    def send(prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 96, "stop": [". ", "\n"], "temperature": 0.0}
        client.post(f"{url}/generate", json=body).raise_for_status()

    with httpx.Client(timeout=120.0, trust_env=False) as client, ThreadPoolExecutor(8) as threads:
        list(threads.map(send, prompts))
    time.sleep(15.0)  # until the replica has stored them


def iterate_prompts() -> Iterator[str]:
    """Yield passages of English from the descriptions and licenses of the installed packages."""
    for distribution in distributions():
        for file in distribution.files or ():
            if not re.search(r"(METADATA|LICENSE[^/]*|NOTICE[^/]*|COPYING[^/]*)$", str(file)):
                continue
            try:
                text = str(file.locate().read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
            for start in range(0, len(text) - _PROMPT_CHARACTERS, _PROMPT_CHARACTERS):
                yield text[start : start + _PROMPT_CHARACTERS]


if __name__ == "__main__":
    main()
