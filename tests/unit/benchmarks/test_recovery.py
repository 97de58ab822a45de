"""The recovery benchmark on a teacher of a test's size: what its tables hold, and how seeds are put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.recovery import Row, measure_tables, spread
from swiftkv_platform.specs import JobSpec
from tests.tiny_models import save_teacher


def _texts(path: Path, word: str) -> Path:
    rows = ({"text": f"def {word}_{i}(x):\n    return x + {i}\n"} for i in range(60))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(seed: int, kl: float, trainable: str = "qkv") -> Row:
    figures = {"kl": kl, "top1_agreement": 0.5, "perplexity_ratio": 1.0}
    row: dict[str, Any] = {"tokens": 100, "start": "calibrated", "objective": "logits", "trainable": trainable}
    return {**row, "seed": seed, "held_out": figures, "other": figures}


def test_runs_of_several_seeds_become_their_mean_and_deviation() -> None:
    qkv, tail = spread([_run(0, 0.1), _run(0, 0.5, "tail"), _run(1, 0.2), _run(2, 0.3)])
    assert (qkv["trainable"], qkv["seeds"], tail["trainable"], tail["seeds"]) == ("qkv", [0, 1, 2], "tail", [0])
    assert qkv["held_out"]["kl"] == {"mean": pytest.approx(0.2), "std": pytest.approx(0.1)}
    assert qkv["other"]["top1_agreement"] == {"mean": 0.5, "std": 0.0}
    assert tail["held_out"]["kl"] == {"mean": 0.5, "std": None}


@pytest.mark.slow  # trains students
def test_seeds_train_on_other_orders_of_the_same_rows(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"name_or_path": str(save_teacher(tmp_path / "teacher")), "dtype": "float32"},
            "swiftkv": {"calibration_tokens": 1024},
            "data": {
                "sources": [{"name_or_path": str(_texts(tmp_path / "train.jsonl", "add"))}],
                "max_length": 64,
                "validation_fraction": 0.2,
            },
            "optimizer": {"name": "muon", "learning_rate": 1e-3},
            "training": {"batch_size": 2, "micro_batch_size": 2, "seed": 5},
            "sharding": {"strategy": "ddp"},
            "resources": {"num_workers": 1},
        }
    )
    other = _texts(tmp_path / "other.jsonl", "of_another_kind")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        figures = measure_tables(spec, tmp_path, ["trained"], [600], seeds=2, other_text=other)
    finally:
        dist.destroy_process_group()

    assert [start["seed"] for start in figures["untrained"]] == [5, 6]
    assert figures["untrained"][0]["copied"] == figures["untrained"][1]["copied"]
    assert [(run["seed"], run["trainable"]) for run in figures["runs"]] == [
        (5, "qkv"),
        (5, "tail"),
        (5, "all"),
        (6, "qkv"),
        (6, "tail"),
        (6, "all"),
    ]
    assert len({run["held_out"]["kl"] for run in figures["runs"]}) == 6
    assert [line["seeds"] for line in figures["spread"]] == [[5, 6]] * 3
    for line, first, second in zip(figures["spread"], figures["runs"][:3], figures["runs"][3:], strict=True):
        assert line["other"]["kl"]["mean"] == pytest.approx((first["other"]["kl"] + second["other"]["kl"]) / 2)
