"""Pages of a report and the card of a model: complete, self-contained, accessible, and safe against odd names."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftkv_platform.contract.sweeps import expand_sweep, make_trial_result, summarize_trials
from swiftkv_platform.reports.model_card import render_model_card
from swiftkv_platform.reports.pages import render_evaluation_page, render_sweep_page
from swiftkv_platform.sources.cards import read_license
from swiftkv_platform.sources.teacher_config import find_builtin_teacher
from swiftkv_platform.specs import JobSpec

VOID = {"meta", "path", "use", "rect", "circle", "line", "br"}


def quality(kl: float) -> dict[str, float]:
    return {"perplexity": 3.0 + kl, "kl": kl, "top1_agreement": 0.9 - kl}


SCORES = {"teacher": 0.75, "student": 0.74, "teacher_stderr": 0.012, "student_stderr": None}
TASK = {
    "task": "gsm8k",
    "metric": "exact_match",
    "num_fewshot": 8,
    "chat_template": False,
    "num_samples": 1319,
    **SCORES,
}


def report(kl: float = 0.1, *, prefill: float = 0.5, passed: bool = True, **changes: Any) -> dict[str, Any]:
    gate = {"field": "evaluation.max_kl", "subject": "held-out KL", "limit": 0.2, "value": kl, "passed": passed}
    bins = [{"low": i / 20, "high": (i + 1) / 20, "share": 0.05, "agreement": i / 20} for i in range(20)]
    bins[3]["agreement"] = None  # type: ignore[assignment]
    return {
        "teacher": {"perplexity": 3.0},
        "rewired": quality(0.8),
        "calibrated": quality(0.4),
        "distilled": quality(kl),
        "perplexity_ratio": (3.0 + kl) / 3.0,
        "kl_recovered": 0.9,
        "num_positions": 12345,
        "prefill_flops_ratio": prefill,
        "kv_bytes_ratio": 0.75,
        "ttft_ms": {"dense": 10.0, "swiftkv": 6.0},
        "tokens_trained": 54321,
        "continuations": {"num_prompts": 4, "prompt_length": 8, "num_tokens": 16, "matched": 0.625, "identical": 0.25},
        "exit_head": bins,
        "tasks": [TASK],
        "gates": [gate],
        **changes,
    }


LINEAGE = {
    "job_id": "job_1",
    "attempt": 2,
    "teacher": "meta/llama <8B>",
    "data_fingerprint": "abc",
    "code_version": "1.0",
    "spec": {"name": "<script>alert(1)</script>"},
}

POINTS = [{"step": i, "tokens": 100 * i, "loss": 1 / i, "logits_loss": 1 / i} for i in range(1, 6)]


class Reader(HTMLParser):
    """A parser that checks that tags nest, and collects tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def assert_stands_alone(html: str) -> None:
    """Check that a page has no script, loads nothing, names every plot and has a light and a dark theme."""
    reader = read(html)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object"}
    for tag, attributes in reader.tags:
        for name in ("src", "href", "xlink:href"):
            assert not attributes.get(name) or attributes[name].startswith("#"), (tag, attributes)
    assert not re.search(r"url\((?!#)", html)
    plots = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert all(plot.get("role") == "img" and plot.get("aria-label") for plot in plots)
    assert "prefers-color-scheme: dark" in html
    assert "currentColor" in html
    tables = [tag for tag, _ in reader.tags].count("table")
    assert tables == [tag for tag, _ in reader.tags].count("caption")


def text_of(html: str) -> str:
    return " ".join("".join(read(html).text).split())


def test_the_evaluation_page_says_what_the_report_does() -> None:
    html = render_evaluation_page(report(), LINEAGE, POINTS)
    assert html == render_evaluation_page(report(), LINEAGE, POINTS), "the same report makes the same page"
    assert_stands_alone(html)
    text = text_of(html)
    figures = ("12,345", "54,321", "62.5%", "25.0%", "0.7500 ± 0.0120", "+1.00", "held-out KL", "passed", "job_1")
    assert [expected for expected in figures if expected not in text] == []
    assert html.count("<svg") == 3  # tasks, exit head, losses
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert ">failed<" in render_evaluation_page(report(passed=False), LINEAGE)
    perplexity = {"metric": "word_perplexity", "teacher": 10.0, "student": 10.2, "higher_is_better": False}
    sure = {"unit": "text", "num_units": 41, "kl": [0.08, 0.12], "top1_agreement": [0.7, 0.75]}
    told = text_of(render_evaluation_page(report(intervals=sure | {"perplexity_ratio": [1.01, 1.05]}), LINEAGE))
    for expected in ("41 texts", "1.010 to 1.050", "0.0800 to 0.1200", "70.0% to 75.0%"):
        assert expected in told, expected
    lost = render_evaluation_page(report(tasks=[TASK | perplexity]), LINEAGE, POINTS)
    assert "+2.00" in text_of(lost), "a perplexity that grows counts as lost"
    for tasks in ([TASK], []):
        left_out = render_evaluation_page(report(tasks=tasks, tasks_left_out=["gsm8k"]), LINEAGE, POINTS)
        told = "Not measured (evaluation.max_minutes reached, or lm-evaluation-harness not installed): gsm8k."
        assert told in text_of(left_out)


@pytest.mark.parametrize(("swiftkv", "is_said"), [({"deep_tail": 16}, True), ({"deep_tail": 1}, False), ({}, False)])
def test_the_evaluation_page_says_which_tokens_of_a_prompt_run_all_layers(
    swiftkv: dict[str, int], is_said: bool
) -> None:
    page = render_evaluation_page(report(), {**LINEAGE, "spec": {"name": "a", "swiftkv": swiftkv}})
    assert ("the last 16 prompt tokens run all layers" in page) == is_said


def test_what_was_not_measured_is_left_out() -> None:
    unmeasured = dict.fromkeys(("rewired", "calibrated", "continuations", "exit_head", "tokens_trained"))
    bare = report(**unmeasured, tasks=[], gates=[])
    html = render_evaluation_page(bare, {}, [])
    read(html)
    assert "<svg" not in html
    for absent in ("Exit head", "Tasks", "Training", "Origin", "copied"):
        assert absent not in html
    assert "The spec has no quality gates" in html


@pytest.mark.parametrize("within", [True, False])
def test_the_sweep_page_shows_every_trial(within: bool) -> None:
    sweep = {"num_key_value_layers": [3, 6], "key_value_group_size": [1, 2]}
    trials = expand_sweep(JobSpec.model_validate({"name": "s", "evaluation": {"max_kl": 0.2}, "sweep": sweep}))
    figures = [(0.05, 0.75), (0.09, 0.75), (0.15, 0.5)]
    points = [
        make_trial_result(trial, report=report(kl, prefill=prefill, passed=within))
        for trial, (kl, prefill) in zip(trials, figures, strict=False)
    ]
    html = render_sweep_page("s", summarize_trials([*points, make_trial_result(trials[-1], error="the loss is <nan>")]))
    assert_stands_alone(html)
    for trial in trials:
        assert trial.name in html
    assert "the loss is &lt;nan&gt;" in html
    assert ("l3-g1 recommended" in html) is within
    assert ("none passes all gates" in html) is not within


MADE_FROM: dict[str, Any] = {
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
    front, text = parts(render_model_card(MADE_FROM, REPORT, license_id="apache-2.0"))
    made = {"library_name": "transformers", "tags": ["swiftkv"], "base_model": "org/teacher"}
    assert front == {"license": "apache-2.0", **made}
    assert "**Worst metric: points lost on mmlu is 2.5, limit 1, failed.**" in text
    assert text.index("Worst metric") < text.index("## Quality")
    assert text.index("| mmlu, acc | 0.6 | 0.575 |") < text.index("| arc, acc |")
    assert text.index("points lost on mmlu (") < text.index("held-out KL in nats (")
    origin = ("`org/chats`, `file-1`", "12,345", "`mdl_1`", "job `job_1`, attempt 2")
    for said in (*origin, "**apache-2.0**", "vllm serve"):
        assert said in text


def test_a_card_says_how_prompts_and_generated_tokens_run() -> None:
    """vLLM serves a list that has all layers below l; others only our engine serves."""
    for listed, said, serves in (([0, 1, 3], "prompts run layers 0-1,3;", "swiftkv"), ([0, 1], "layers 0-1;", "vllm")):
        spec = {**MADE_FROM["spec"], "swiftkv": {"prefill_layers": listed, "decode_key_value": "own"}}
        _, text = parts(render_model_card(MADE_FROM | {"spec": spec}, REPORT, license_id=None))
        assert said in text
        assert "quality is measured on text after a prompt" in text
        assert f"\n{serves} serve ./" in text


def test_a_licence_that_is_not_named_is_not_made_up() -> None:
    front, text = parts(
        render_model_card(MADE_FROM | {"teacher": "/models/own"}, REPORT | {"gates": []}, license_id=None)
    )
    assert "license" not in front
    assert "base_model" not in front
    assert "names a license" in text
    assert "This model has no quality gates" in text


def test_the_licence_is_that_of_the_card_or_the_configuration(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, str], str | None]] = [
        ({"README.md": "---\nlicense: llama3.1\n---\n# M\n"}, "llama3.1"),
        ({"README.md": "---\nlicense: other\nlicense_name: research only\n---\n"}, "research only"),
        ({"README.md": "# no front matter", "config.json": '{"license": "mit"}'}, "mit"),
        ({"README.md": "---\n: [\n---\n", "config.json": "{"}, None),
        ({}, None),
    ]
    for number, (files, licence) in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
        assert read_license(directory) == licence
    assert read_license(find_builtin_teacher("builtin:python-5m")) == "apache-2.0"
