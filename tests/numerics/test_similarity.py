"""SimScore against equation 1 written out, the recommendations built on it, and the analysis of a real model and
text."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.evaluation.analysis import (
    AnalysisOptions,
    Needles,
    UntrainedReport,
    analyze,
    collect_similarity,
    find_smallest_depth,
    recommend_depth,
)
from swiftkv_platform.evaluation.harness.builtin import MAX_ANSWER_TOKENS
from swiftkv_platform.model import convert
from swiftkv_platform.planning import read_config
from tests.support.tiny_models import byte_tokenizer, random_teacher, save_teacher


def naive_scores(sequences: list[torch.Tensor]) -> list[float]:
    """Compute equation 1 for one token and one pair of layers at a time, each sequence by itself."""
    model = random_teacher()
    inputs: list[list[torch.Tensor]] = [[] for _ in range(6)]  # by layer, of every token
    for layer, kept in zip(model.model.layers, inputs, strict=True):
        layer.register_forward_pre_hook(lambda _module, args, kept=kept: kept.extend(args[0][0].double()))
    with torch.no_grad():
        for ids in sequences:
            model(ids[None], use_cache=False)
    scores = []
    for first in range(5):
        total = 0.0
        for later in range(first + 1, 6):
            pairs = list(zip(inputs[first], inputs[later], strict=True))
            total += float(sum(a @ b / (a.norm() * b.norm()) for a, b in pairs)) / len(pairs)
        scores.append(total / (5 - first))
    return scores


@pytest.fixture
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(256, (length,), generator=generator) for length in (9, 14)]


def test_scores_equal_equation_1(sequences: list[torch.Tensor]) -> None:
    """Padding and packing do not change the scores."""
    naive = naive_scores(sequences)
    similarity = collect_similarity(random_teacher(), (ids[None] for ids in sequences))
    assert similarity.num_tokens == 23
    assert similarity.sim_scores == pytest.approx(naive, abs=1e-6)
    assert max(naive) - min(naive) > 0.1
    padded = {
        "input_ids": torch.stack([torch.cat((sequences[0], torch.full((5,), 7))), sequences[1]]),
        "attention_mask": torch.tensor([[1] * 9 + [0] * 5, [1] * 14]),
    }
    assert collect_similarity(random_teacher(), [padded]).sim_scores == pytest.approx(naive, abs=1e-5)
    packed = {
        "input_ids": torch.cat((*sequences, torch.full((4,), 7)))[None],
        "position_ids": torch.cat([torch.arange(n) for n in (9, 14, 4)])[None],
        "loss_mask": torch.tensor([[True] * 23 + [False] * 4]),
    }
    student = convert(random_teacher(), num_key_value_layers=3).swiftkv(False)
    assert collect_similarity(student, [packed]).sim_scores == pytest.approx(naive, abs=1e-5)
    with pytest.raises(InvalidInputError, match="got no tokens"):
        collect_similarity(random_teacher(), [])


def test_the_recommended_depth() -> None:
    assert recommend_depth([0.9] * 7) == 4, "never below half of 8 layers"
    assert recommend_depth([0.9, 0.9, 0.9, 0.9, 0.9, 0.4, 0.6]) == 6
    assert recommend_depth([0.1] * 7) == 7
    assert recommend_depth([0.1]) == 1


def test_the_shallowest_depth_within_a_kl_that_loses_no_needles() -> None:
    quality = {1: (0.1, 1.0), 2: (0.5, 0.5), 3: (0.2, 0.9), 4: (0.0, 1.0)}
    same = {"prefill_layers": (), "perplexity": 9, "top1_agreement": 1}
    depths = {depth: UntrainedReport(kl=kl, needles_found=found, **same) for depth, (kl, found) in quality.items()}
    assert find_smallest_depth(depths, max_kl=0.2) == 3
    assert find_smallest_depth(depths, max_kl=1.0) == 1
    assert find_smallest_depth({depth: depths[depth] for depth in (1, 2)}, max_kl=0.2) is None
    near = {depth: start.model_copy(update={"kl": 0.1}) for depth, start in depths.items()}
    assert find_smallest_depth(near, max_kl=0.2, min_found=0.9) == 3
    assert find_smallest_depth(near, max_kl=0.2, min_found=0.95) == 4
    assert find_smallest_depth(near, max_kl=0.2) == 1


class _Reader:
    """Answers the first `forgets` prompts with their number and the others wrongly; no random model can."""

    device = torch.device("cpu")

    def __init__(self, needles: Needles, forgets: int) -> None:
        self._tokenizer, self._left = needles.tokenizer, forgets

    def generate(self, ids: torch.Tensor, attention_mask: torch.Tensor, **_settings: Any) -> torch.Tensor:
        return torch.stack([self._answer(row, row[seen == 1]) for row, seen in zip(ids, attention_mask, strict=True)])

    def _answer(self, row: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        number = re.search(r"is (\d{5})\.", self._tokenizer.decode(prompt))
        assert number is not None
        answer = f"It is {number[1]}." if self._left >= 0 else "It is 70000."
        return torch.cat((row, torch.tensor(self._tokenizer.encode(answer))))


def test_the_share_of_needles_found() -> None:
    """More prompts than fit one batch, of different lengths."""
    needles = Needles.create(byte_tokenizer(), 512, 24)
    assert 400 < max(map(len, needles.prompts)) == needles.max_total_length - MAX_ANSWER_TOKENS <= 520
    assert needles.measure_share_found(_Reader(needles, forgets=18)) == 0.75
    assert needles.measure_share_found(random_teacher(max_position_embeddings=1024)) == 0.0


def analyze_text(directory: Path, options: AnalysisOptions) -> Any:
    """Analyze a tiny model on a text of a few windows."""
    model, text = save_teacher(directory / "model", max_position_embeddings=512), directory / "text.txt"
    text.write_text("Some text that is long enough to be cut into several windows of thirty-two bytes each.\n" * 8)
    return analyze("tiny", read_config(model), str(model), [str(text)], options, dtype="float32")


def test_analysis_of_a_model(tmp_path: Path) -> None:
    needles: Any = {"needle_length": 256, "needle_samples": 2, "max_kl": 1e-6}
    options = AnalysisOptions(max_length=32, measure=True, depths=(2, 5), key_value_group_size=2, **needles)
    analysis = analyze_text(tmp_path, options)
    assert len(analysis.sim_scores) == 5
    assert [depth.num_key_value_layers for depth in analysis.depths] == [1, 2, 3, 4, 5]
    shallow, last = analysis.depths[1], analysis.depths[-1]
    assert shallow.sim_score == analysis.sim_scores[2]
    assert shallow.kl > 1e-3
    # The last layer's K and V come from the same input as the teacher's: calibration finds the same map.
    assert last.sim_score is None
    assert last.kl == pytest.approx(0.0, abs=1e-6)
    assert last.perplexity == pytest.approx(analysis.teacher_perplexity, rel=1e-3)
    assert analysis.recommended_num_key_value_layers == 5
    assert (analysis.teacher_needles_found, shallow.needles_found) == (0.0, 0.0)
    assert "needles" not in analysis.rule, "needles do not count if the teacher finds none"
    assert (analysis.depths[0].kl, analysis.depths[0].needles_found) == (None, None)


def test_layers_that_prompts_can_bypass(tmp_path: Path) -> None:
    options = AnalysisOptions(max_length=32, num_prefill_layers=3, depths=(4, 5), needle_length=256, needle_samples=2)
    found = analyze_text(tmp_path, options)
    assert len(found.bypass_kl) == 4, "layers 0 to 3, below the last of the deepest list"
    assert min(found.bypass_kl) > 1e-6
    cheapest = sorted(range(4), key=found.bypass_kl.__getitem__)
    lists = [each.prefill_layers for each in found.lists]
    assert lists[0] == (0, 1, 2)
    assert lists[2] == tuple(i for i in range(5) if i not in cheapest[:2])
    assert [len(each) for each in lists] == [3, 3, 3]
    assert (lists[1][-1], lists[2][-1]) == (3, 4)
    best = min(found.lists, key=lambda each: each.kl)
    assert found.recommended_prefill_layers == best.prefill_layers
    assert best.kl > 0.0 == best.needles_found == found.teacher_needles_found


def test_what_an_analysis_refuses(tmp_path: Path) -> None:
    model, text = save_teacher(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("One document.")
    too_long = AnalysisOptions(measure=True, needle_length=4096)
    for options, error, message in (
        (AnalysisOptions(depths=(6,)), InvalidInputError, r"depth is 6; use 1\.\.5 for a model of 6 layers"),
        (AnalysisOptions(measure=True), DataError, "none can be held out"),
        (AnalysisOptions(needle_length=256), InvalidInputError, "needle_length is 256, but no depth is measured"),
        (AnalysisOptions(num_prefill_layers=5), InvalidInputError, r"num_prefill_layers is 5; use 1\.\.4"),
        (
            AnalysisOptions(num_prefill_layers=3, depths=(3,)),
            InvalidInputError,
            r"depth is 3; use 4\.\.5 to keep 3 layers",
        ),
        (AnalysisOptions(num_prefill_layers=3, measure=True), InvalidInputError, "cannot be combined with measure"),
        (too_long, InvalidInputError, "needle_length 4096 needs .* context has"),
    ):
        with pytest.raises(error, match=message):
            analyze("tiny", read_config(model), str(model), [str(text)], options)
