"""Two models side by side: which is better at what, and what was done differently."""

from __future__ import annotations

from typing import Any

from swiftkv_platform.orchestration.comparison import Figure, compare
from swiftkv_platform.orchestration.job import Model


def model(metrics: dict[str, Any], **lineage: Any) -> Model:
    return Model("mdl_x", "acme", "m", "job_x", 1, 100, "s3://b/a", "d", 1, lineage, metrics)


def test_figures_say_which_is_better_and_lineage_whether_that_counts() -> None:
    spec = {"swiftkv": {"key_value_group_size": 2}, "optimizer": {"learning_rate": 0.1}}
    a = model(
        {
            "distilled": {"kl": 0.1, "top1_agreement": 0.9},
            "kv_bytes_ratio": 0.75,
            "tasks": [{"task": "mmlu", "student": 60.0}],
        },
        teacher="t",
        data_fingerprint="x",
        spec=spec,
    )
    b = model(
        {
            "distilled": {"kl": 0.2, "top1_agreement": 0.8},
            "kv_bytes_ratio": 0.5,
            "tasks": [{"task": "mmlu", "student": 61.0}],
        },
        teacher="t",
        data_fingerprint="y",
        spec={**spec, "swiftkv": {"key_value_group_size": 4}},
    )
    found = compare(a, b)
    figures = {figure.name: figure for figure in found.figures}
    assert figures["distilled.kl"] == Figure("distilled.kl", 0.1, 0.2, "a")
    assert figures["distilled.top1_agreement"].better == "a"
    assert figures["kv_bytes_ratio"].better == "b"
    assert figures["tasks.mmlu.student"] == Figure("tasks.mmlu.student", 60.0, 61.0, "b")
    assert figures["distilled.perplexity"] == Figure("distilled.perplexity", None, None, None)
    less = {"task": "wikitext", "student": 9.0, "higher_is_better": False}
    perplexities = compare(model({"tasks": [less]}), model({"tasks": [less | {"student": 8.0}]})).figures
    assert perplexities[-1] == Figure("tasks.wikitext.student", 9.0, 8.0, "b")
    assert found.differences == {"data_fingerprint": ("x", "y")}
    assert found.spec_differences == {"swiftkv.key_value_group_size": (2, 4)}
