"""An adapter in vLLM equals the full artifact bit for bit; another base is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from swiftkv_platform.configs.adapter import ADAPTER_FILE
from swiftkv_platform.model import export_adapter
from tests.outside.vllm.engines import OWN, SHAPE, make_student, prompts, serving
from tests.support.tiny_models import family_teacher

SCORED = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=5)


def make_adapter(name: str, tmp_path: Path, shape: dict[str, Any] = SHAPE, **base_options: Any) -> tuple[Path, Path]:
    """Save a full student and its adapter; the base has the weights that the student was converted from."""
    base, full, adapter = (tmp_path / part for part in ("base", "full", "adapter"))
    family_teacher(name).save_pretrained(base, **base_options)
    make_student(full, name, shape=shape)
    export_adapter(full, adapter, base=base)
    return full, adapter


def scored(directory: Path) -> tuple[list[list[int]], list[dict[int, float]]]:
    """Return tokens and their exact log-probabilities."""
    with serving(directory) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], SCORED, use_tqdm=False)
    samples = [sample for output in outputs for sample in output.outputs]
    tokens = [list(sample.token_ids) for sample in samples]
    logprobs = [{token: entry.logprob for token, entry in row.items()} for sample in samples for row in sample.logprobs]
    return tokens, logprobs


@pytest.mark.parametrize(("name", "shape"), [("llama", SHAPE), ("qwen3_moe", OWN)])
def test_an_adapter_gives_the_log_probabilities_of_the_whole_artifact(
    name: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    full, adapter = make_adapter(name, tmp_path, shape, max_shard_size="100KB")
    assert scored(adapter) == scored(full)


def test_another_base_and_one_that_vllm_cannot_find_are_refused(tmp_path: Path) -> None:
    _, adapter = make_adapter("llama", tmp_path)
    family_teacher("llama", seed=4).save_pretrained(tmp_path / "base")
    with pytest.raises(Exception, match="has the SHA-256"), serving(adapter):
        pass
    document = json.loads((adapter / ADAPTER_FILE).read_text())
    document["base"]["name_or_path"] = "builtin:python-5m"
    (adapter / ADAPTER_FILE).write_text(json.dumps(document))
    with pytest.raises(Exception, match=r"Serve the whole model: .swiftkv export .* WHOLE. writes"), serving(adapter):
        pass
