"""A decode step on a GPU launches as many kernels for many sequences as for few.

Each operator is a kernel that the host launches, and a small model's step takes as long as its launches. Operators are
counted on fake CUDA tensors.
"""

import pytest
import torch
from transformers import LlamaConfig

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.loading import LoadedModel, prepare_model
from swiftkv_platform.model.families import get_student_classes
from swiftkv_platform.student_shape import StudentShape
from tests.support.fakes.cuda import DEVICE, DeviceLog, fake_cuda

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, ignore_eos=True)


def make_engine(num_layers: int, batch_size: int) -> LLMEngine:
    """An engine on a student whose weights have no values; the upper half of its layers share KV in pairs."""
    teacher = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    classes = get_student_classes("llama")
    config = classes.make_config(teacher, StudentShape(num_key_value_layers=num_layers // 2, key_value_group_size=2))
    with torch.device(DEVICE):
        model = classes.causal_lm._from_config(config, dtype=torch.bfloat16).eval()
    settings = EngineConfig(max_num_seqs=batch_size, kv_cache_bytes=1 << 30)
    return LLMEngine(
        LoadedModel(model.config, None, frozenset(), 1024, prepare_model(model, settings), "counts"), settings
    )


def decode_step(log: DeviceLog, batch_size: int, params: SamplingParams) -> None:
    """Log one step in which every one of `batch_size` sequences, of different lengths, gets a token."""
    engine = make_engine(4, batch_size)
    for index in range(batch_size):
        engine.add_request([1] * (3 + index), params)
    for _ in range(2):  # the prompts, and a first decode
        engine.step()
    log.clear()
    outputs = engine.step()
    assert len(outputs) == batch_size, "the step does not decode all sequences"


def counts(batch_size: int, params: SamplingParams) -> tuple[dict[str, int], int, int]:
    """Operators by name, copies from the host to the device, and times the host waits for the device."""
    with fake_cuda() as log:
        decode_step(log, batch_size, params)
        return dict(log.kernels), log.copies, len(log.waits)


@pytest.mark.slow("engines of small and large batches")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_operators_do_not_grow_with_the_batch(params: SamplingParams) -> None:
    few, few_copies, few_waits = counts(4, params)
    many, many_copies, many_waits = counts(32, params)
    assert sum(many.values()) <= 1.2 * sum(few.values())
    assert many_copies == few_copies
    assert many_waits == few_waits == 1
    assert many["torch_attn._varlen_attn"] == 4, "one for each layer"
