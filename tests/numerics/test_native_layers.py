"""Layers in one operator equal the family's modules on the same kernels, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams, kernels
from swiftkv_platform.engine.native_layers import NativeLayer, NativeLayers
from swiftkv_platform.model import convert
from tests.support.parameters import in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher, random_tokens

CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=17, block_size=4, kv_cache_bytes=1 << 20)
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPTS = [random_tokens(size, seed=size).tolist() for size in (40, 3, 25)]
FORMS = [("shared", 1, "auto"), ("own", 2, "int8"), ("own", 1, "auto"), ("shared", 2, "fp8")]
"""Decode K and V, group size, and KV cache dtype."""
OTHER_LAYERS = {"granite", "olmo2", "olmo3", "gemma2", "gemma3_text", "mixtral", "deepseek_v2"}
"""Families with post-norms, residual multipliers, other activations, experts or latents: these keep their modules."""
SOME_LAYERS = {"qwen3_moe"}
"""Families with experts in some of the layers."""


@pytest.mark.parametrize(("name", "form"), in_turn(FAMILY_CONFIGS, FORMS))
def test_layers_in_one_operator(
    name: str,
    form: tuple[Any, int, Any],
    tmp_path: Path,
    native_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run the student in chunks and batches, with prompt log-probabilities (whose rows write no K and V) and
    without; all layers of a half at once, one by one, and as the family's modules."""
    teacher: Any = family_teacher(name, head_dim=32)
    own, g, kv_cache_dtype = form
    student = disturb(convert(teacher, num_key_value_layers=2, key_value_group_size=g, decode_key_value=own))
    student.to(torch.bfloat16).save_pretrained(tmp_path)

    at_once: list[int] = []
    run = kernels.run_layers

    def counting(x: torch.Tensor, operands: Any, *others: Any) -> torch.Tensor:
        at_once.append(len(operands.factors) // 4)
        return run(x, operands, *others)

    monkeypatch.setattr(kernels, "run_layers", counting)

    def found() -> tuple[set[int], list[Any]]:
        at_once.clear()
        engine = LLMEngine.from_pretrained(tmp_path, CONFIG.model_copy(update={"kv_cache_dtype": kv_cache_dtype}))
        outputs = [engine.generate(PROMPTS, params) for params in (PARAMS, replace(PARAMS, prompt_logprobs=0))]
        engine.assert_consistent()
        return set(at_once), [(one.token_ids, one.logprobs, one.prompt_logprobs) for some in outputs for one in some]

    num_layers = student.config.num_hidden_layers
    kind = FAMILY_CONFIGS[name].model_type
    usual = kind not in OTHER_LAYERS
    counts, together = found()
    assert bool(counts) == usual
    assert not usual or kind in SOME_LAYERS or counts >= {2, num_layers - 2}
    monkeypatch.setattr(NativeLayers, "__call__", lambda *_: None)
    counts, one_by_one = found()
    assert counts == ({1} if usual else set())
    monkeypatch.setattr(NativeLayer, "from_layer", classmethod(lambda _cls, _layer: None))
    assert together == one_by_one == found()[1]
