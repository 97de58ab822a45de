"""The card of a model: the worst first, and the licence of what it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftkv_platform.reports.model_card import model_card
from swiftkv_platform.sources.cards import licence_of
from swiftkv_platform.sources.teacher_config import builtin_teacher

LINEAGE: dict[str, Any] = {
    "job_id": "job_1",
    "attempt": 2,
    "teacher": "org/teacher",
    "revision": "abc",
    "data_fingerprint": "f00",
    "code_version": "0.2",
    "parent": {"name": "mdl_1"},
    "spec": {
        "name": "student",
        "data": {"sources": [{"name_or_path": "org/chats"}, {"name_or_path": "file-1"}]},
        "swiftkv": {"num_key_value_layers": 6, "key_value_group_size": 2},
    },
}
GATES = [
    {"field": "evaluation.max_drop", "subject": "points lost on mmlu", "limit": 1.0, "value": 2.5, "outcome": "failed"},
    {"field": "evaluation.max_kl", "subject": "held-out KL in nats", "limit": 0.5, "value": 0.1, "outcome": "passed"},
]
REPORT: dict[str, Any] = {
    "teacher": {"perplexity": 10.0},
    "distilled": {"perplexity": 11.0, "kl": 0.1, "top1_agreement": 0.9},
    "prefill_flops_ratio": 0.55,
    "kv_bytes_ratio": 0.75,
    "tokens_trained": 12345,
    "tasks": [
        {"task": "arc", "metric": "acc", "teacher": 0.5, "student": 0.5},
        {"task": "mmlu", "metric": "acc", "teacher": 0.6, "student": 0.575},
    ],
    "gates": GATES,
}


def parts(card: str) -> tuple[dict[str, Any], str]:
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_worst_measure_comes_first() -> None:
    front, text = parts(model_card(LINEAGE, REPORT, licence="apache-2.0"))
    assert front == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "tags": ["swiftkv"],
        "base_model": "org/teacher",
    }
    assert "**Worst measure: points lost on mmlu is 2.5, limit 1, failed.**" in text
    assert text.index("Worst measure") < text.index("## Quality")
    assert text.index("| mmlu, acc | 0.6 | 0.575 |") < text.index("| arc, acc |")
    assert text.index("points lost on mmlu (") < text.index("held-out KL in nats (")
    for said in (
        "`org/chats`, `file-1`",
        "12,345",
        "`mdl_1`",
        "job `job_1`, attempt 2",
        "**apache-2.0**",
        "vllm serve",
    ):
        assert said in text


def test_a_licence_that_is_not_named_is_not_made_up() -> None:
    front, text = parts(model_card(LINEAGE | {"teacher": "/models/own"}, REPORT | {"gates": []}, licence=None))
    assert "license" not in front
    assert "base_model" not in front
    assert "names a licence" in text
    assert "No limit of quality was set" in text


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"README.md": "---\nlicense: llama3.1\n---\n# M\n"}, "llama3.1"),
        ({"README.md": "---\nlicense: other\nlicense_name: research only\n---\n"}, "research only"),
        ({"README.md": "# no front matter", "config.json": '{"license": "mit"}'}, "mit"),
        ({"README.md": "---\n: [\n---\n", "config.json": "{"}, None),
        ({}, None),
    ],
)
def test_the_licence_is_that_of_the_card_or_the_configuration(
    tmp_path: Path, files: dict[str, str], licence: str | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert licence_of(tmp_path) == licence


def test_the_built_in_teacher_names_its_licence() -> None:
    assert licence_of(builtin_teacher("builtin:python-5m")) == "apache-2.0"
