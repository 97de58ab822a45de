"""A fine-tuning job from upload to chat with OpenAI's Python client, over HTTP only."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai

TEACHER = "builtin:python-5m"
SWIFTKV: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "swiftkv": {"num_key_value_layers": 6, "key_value_group_size": 2, "calibration_tokens": 1024},
    "data": {"max_length": 128, "validation_fraction": 0.1},
    "training": {"max_steps": 2, "batch_size": 2},
    "checkpoint": {"every_steps": 1},
    "evaluation": {"max_tokens": 256},
    "resources": {"num_workers": 1},
    "tracking": {"wandb": {"mode": "disabled"}},
}
"""The job settings that OpenAI's fields cannot express."""
QUESTION: list[Any] = [{"role": "user", "content": "Add 7 to a number."}]
ANSWERS = {f"Add {number} to a number.": f"def add_{number}(x):\n    return x + {number}\n" for number in range(40)}
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in ANSWERS.items()
]
ROWS = "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS)
_DEADLINE_S = 300.0


def tune_and_chat(url: str) -> openai.types.fine_tuning.FineTuningJob:
    """Upload, tune, follow and chat on a control plane without keys; leave only the returned job and its model."""
    with openai.OpenAI(api_key="none", base_url=f"{url}/v1") as client:
        file = client.files.create(file=("chats.jsonl", ROWS.encode()), purpose="fine-tune")
        asked: dict[str, Any] = {"training_file": file.id, "suffix": "adder", "extra_body": {"swiftkv": SWIFTKV}}
        job = client.fine_tuning.jobs.create(model=TEACHER, **asked)
        deadline = time.monotonic() + _DEADLINE_S
        while job.status not in ("succeeded", "failed", "cancelled"):
            assert time.monotonic() < deadline, f"the job is {job.status}"
            time.sleep(0.5)
            job = client.fine_tuning.jobs.retrieve(job.id)
        events = list(client.fine_tuning.jobs.list_events(job.id))
        assert job.status == "succeeded", [event.message for event in reversed(events)]
        assert {event.type for event in events} == {"message", "metrics"}
        checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
        assert [checkpoint.step_number for checkpoint in checkpoints] == [2, 1]
        assert client.files.delete(file.id).deleted, "a file that no running job uses can be deleted"
    assert chat(url, job.fine_tuned_model)
    return job


def chat(url: str, model: str) -> str:
    """Deploy a model, send it one chat request, and delete the deployment."""
    with httpx.Client(base_url=url, timeout=60.0) as platform:
        made = platform.post("/deployments", json={"model": model, "route_prefix": "/tuned"}).raise_for_status().json()
        deadline = time.monotonic() + _DEADLINE_S
        while made["status"] != "running":
            assert made["status"] != "failed", made
            assert time.monotonic() < deadline, made
            time.sleep(0.5)
            made = platform.get(f"/deployments/{made['id']}").raise_for_status().json()
        try:
            with openai.OpenAI(api_key="none", base_url=f"{made['url']}/v1") as client:
                served = client.models.list().data[0].id
                answer = client.chat.completions.create(model=served, messages=QUESTION, max_tokens=16)
                return answer.choices[0].message.content or ""
        finally:
            platform.delete(f"/deployments/{made['id']}").raise_for_status()
