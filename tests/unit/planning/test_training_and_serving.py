"""Plans of training and serving follow their setup; numerics tests compare them with real steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning import ServingSetup, TrainingSetup, plan_serving, plan_training
from swiftkv_platform.student_shape import RequestedStudentShape
from tests.support.model_configs import llama_config

LLAMA_8B = Path(__file__).parents[3] / "benchmarks" / "configs" / "llama-3.1-8b.json"
LATENT = llama_config(4, model_type="deepseek_v2", first_k_dense_replace=4, q_lora_rank=None)


def memory(**setup: Any) -> Any:
    return plan_training(LLAMA_8B, TrainingSetup(num_workers=4, sequence_length=1024, **setup)).memory


def test_memory_of_strategies() -> None:
    """From ddp to ZeRO 3 each worker holds less; offloading moves bytes to the host; activation checkpointing trades
    memory for arithmetic."""
    zero = [memory(strategy="deepspeed", zero_stage=stage) for stage in (1, 2, 3)]
    ddp, fsdp = memory(strategy="ddp"), memory(strategy="fsdp2")
    assert ddp.optimizer == 4 * zero[0].optimizer == 4 * zero[2].optimizer == 4 * fsdp.optimizer
    assert ddp.frozen == zero[0].frozen == zero[1].frozen == 4 * zero[2].frozen == 4 * fsdp.frozen
    assert zero[1].gradients < zero[0].gradients
    assert ddp.peak > zero[0].peak > zero[1].peak > zero[2].peak
    assert ddp.activations == fsdp.activations
    near, far = memory(), memory(cpu_offload=True)
    assert far.host == near.frozen + near.trained + near.gradients + near.optimizer
    assert far.frozen == far.trained == far.gradients == far.optimizer == 0
    assert far.gathered == near.gathered
    assert memory(cpu_offload=True, device="cpu").host == 0  # on a CPU everything is in host memory anyway
    plain, recomputed = (
        plan_training(LLAMA_8B, TrainingSetup(gradient_checkpointing=value)) for value in (False, True)
    )
    assert recomputed.memory.activations < plain.memory.activations / 5
    assert recomputed.flops_per_token.total > plain.flops_per_token.total


def test_arithmetic_and_time_of_a_token() -> None:
    """Compared with a reference that runs teacher and student from the first layer on, and recomputes activations."""
    flops = plan_training(LLAMA_8B, TrainingSetup(sequence_length=2048)).flops_per_token
    separate = flops.total + flops.lower + flops.lower + flops.student  # the student's lower layers, and recomputation
    assert flops.total / separate == pytest.approx(2 / 3, abs=0.08)
    whole = plan_training(LLAMA_8B, TrainingSetup()).flops_per_token
    half = plan_training(LLAMA_8B, TrainingSetup(counted_share=0.5)).flops_per_token
    together = plan_training(LLAMA_8B, TrainingSetup(counted_share=0.5, compiled=True)).flops_per_token
    assert half.heads == together.heads == whole.heads / 2
    assert half.student < together.student == whole.student
    assert (half.lower, half.teacher) == (whole.lower, whole.teacher)
    setup = TrainingSetup(num_workers=4)
    planned = plan_training(LLAMA_8B, setup, num_tokens=10**6, flops_per_second=1e14)
    assert planned.total_flops == 10**6 * planned.flops_per_token.total
    assert planned.seconds == planned.total_flops / 4e14
    assert plan_training(LLAMA_8B, setup).seconds is None


def test_long_rows_fit_where_workers_share_them() -> None:
    """A row of 128K tokens fits 80 GB GPUs where eight workers share it (Llama-3.1-8B)."""
    base = TrainingSetup(sequence_length=131072, num_workers=8, batch_size=8)
    alone, shared = (plan_training(LLAMA_8B, replace(base, sequence_parallel_size=size)).memory for size in (1, 8))
    assert alone.peak > 80e9 > shared.peak
    assert alone.activations / 8 == pytest.approx(shared.activations, rel=0.01)
    assert alone.frozen == shared.frozen


def test_batches_and_sequences_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"batch_size is 10; use a multiple of .* = 4$"):
        plan_training(LLAMA_8B, TrainingSetup(num_workers=4, batch_size=10))
    cases: list[tuple[dict[str, int], str]] = [
        ({"num_workers": 6}, "resources.num_workers = 6"),
        ({"sequence_length": 1026}, "data.max_length = 1026"),
        ({"num_workers": 16, "sequence_parallel_size": 16}, "num_key_value_heads = 8"),
    ]
    for changes, named in cases:
        setup = replace(TrainingSetup(num_workers=4, batch_size=48, sequence_parallel_size=4), **changes)
        with pytest.raises(InvalidInputError, match=f"must divide {named}") as raised:
            plan_training(LLAMA_8B, setup)
        assert raised.value.field == "sharding.sequence_parallel_size"


def test_capacity_of_a_gpu() -> None:
    setup = ServingSetup(memory_bytes=80 << 30, sequence_length=131072)
    planned = plan_serving(LLAMA_8B, setup, RequestedStudentShape(key_value_group_size=2).resolve(32))
    assert planned.dense.kv_block_bytes == 16 * 131072
    assert planned.swiftkv.kv_block_bytes == planned.dense.kv_block_bytes * 3 // 4
    assert planned.swiftkv.num_tokens == planned.swiftkv.num_blocks * 16 > planned.dense.num_tokens
    used = planned.swiftkv.weights_bytes + planned.swiftkv.num_blocks * planned.swiftkv.kv_block_bytes
    assert 0 <= 0.9 * (80 << 30) - used < planned.swiftkv.kv_block_bytes
    fields = ["weights_bytes", "kv_block_bytes", "num_blocks", "num_tokens", "num_sequences"]
    assert list(planned.dense.model_dump()) == fields, "`swiftkv plan --json` has these names"
    assert plan_serving(LLAMA_8B, ServingSetup(memory_bytes=1 << 30, sequence_length=16)).swiftkv.num_sequences == 0


def test_adapters_take_memory_from_the_cache() -> None:
    setup = ServingSetup(memory_bytes=80 << 30, sequence_length=131072)
    shape = RequestedStudentShape(key_value_group_size=2).resolve(32)
    alone, ten = (plan_serving(LLAMA_8B, replace(setup, num_adapters=count), shape) for count in (0, 10))
    added = ten.swiftkv.weights_bytes - alone.swiftkv.weights_bytes
    assert added == 10 * 2 * (16 * 4096**2 + 8 * 2 * 4096 * 1024 + 4096), "queries, keys and values, norm"
    assert ten.swiftkv.num_blocks == alone.swiftkv.num_blocks - -(-added // alone.swiftkv.kv_block_bytes)
    assert ten.dense == alone.dense


def test_tensor_parallel_splits_heads_but_no_latent() -> None:
    def block(config: Any, ways: int) -> int:
        setup = ServingSetup(memory_bytes=80 << 30, sequence_length=64, tensor_parallel_size=ways)
        return plan_serving(config, setup).swiftkv.kv_block_bytes

    assert block(LLAMA_8B, 4) * 4 == block(LLAMA_8B, 1)
    assert block(LLAMA_8B, 16) == block(LLAMA_8B, 8)
    assert block(LATENT, 4) == block(LATENT, 1)


def test_what_serving_refuses() -> None:
    for field, value in {
        "weights_dtype": "int3",
        "kv_cache_dtype": "int3",
        "num_adapters": -1,
        "memory_bytes": 0,
        "reserved": 1.0,
    }.items():
        setup = ServingSetup(**({"memory_bytes": 1 << 34, "sequence_length": 64} | {field: value}))
        with pytest.raises(InvalidInputError) as caught:
            plan_serving(LLAMA_8B, setup)
        assert caught.value.field == field
