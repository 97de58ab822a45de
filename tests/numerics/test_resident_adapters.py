"""Adapters of one resident base in an engine: each gives its merged model's text in mixed batches, and takes the memory
of its own tensors."""

import dataclasses
import gc
import os
import random
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftkv_platform.configs.adapter import read_adapter
from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from swiftkv_platform.engine.adapters import map_weight_bytes_by_address
from swiftkv_platform.engine.kv_cache import get_bytes_per_block
from swiftkv_platform.engine.loading import load_adapter, load_model
from swiftkv_platform.engine.memory import FREE_MEMORY_DIVISOR, get_kv_cache_format, get_layer_shapes
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import convert, convert_checkpoint, export_adapter
from swiftkv_platform.planning import ServingSetup, plan_serving
from tests.support.checkpoints import ROWS, save, save_fp8
from tests.support.engine_schedules import make_drafts_free
from tests.support.parameters import few
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher

pytestmark = pytest.mark.slow("each test loads several models twice")

SHAPE: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": True}
SMALL: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
"""Options with which sequences wait, and prompts run in chunks."""
NUM_BLOCKS = 24
"""So few that sequences preempt each other."""


def save_base(directory: Path, dtype: str = "bfloat16", family: str = "llama", **changes: Any) -> Path:
    return save(family_teacher(family, **changes).to(getattr(torch, dtype)), directory)


def save_adapter(base: Path, target: Path, *, seed: int, changed: str = "", **shape: Any) -> Path:
    """Export a student of `base` as an adapter. `changed`: name of tensors of the base that it replaces."""
    torch.manual_seed(seed)
    student = disturb(convert(base, **{name: value for name, value in (SHAPE | shape).items() if value is not None}))
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if changed and changed in name:
                parameter.mul_(1 + 0.1 * seed)
    full = save(student, target.with_name(f"{target.name}-full"))
    written = export_adapter(full, target, base=base)
    assert bool(written.replaced) == bool(changed)
    return target


def save_adapters(base: Path, directory: Path, count: int, **shape: Any) -> dict[str, Path]:
    return {f"a{i}": save_adapter(base, directory / f"a{i}", seed=i, **shape) for i in range(count)}


def make_requests(adapters: Mapping[str, Path], *, seed: int = 0) -> list[tuple[str, list[int], SamplingParams]]:
    """Return (adapter, prompt, params) of requests whose prompts share prefixes across adapters."""
    draw = random.Random(seed)
    prefix = [draw.randrange(250) for _ in range(13)]
    requests = []
    for number in range(2 * len(adapters) + 4):
        own = [draw.randrange(250) for _ in range(draw.choice([1, 9, 30]))] * draw.choice([1, 2])
        params = SamplingParams(
            max_tokens=draw.choice([3, 8, 12]),
            temperature=draw.choice([0.0, 0.0, 1.0]),
            seed=number,
            n=draw.choice([1, 1, 2]),
            ignore_eos=True,
            logprobs=1,
            early_exit=EarlyExit(draw.choice(["off", "lossless"]), 0.0, 3),
            num_lookup_tokens=draw.choice([0, 4]),
        )
        requests.append((list(adapters)[number % len(adapters)], prefix + own if number % 3 else prefix, params))
    return requests


def run_mixed(engine: LLMEngine, requests: list[tuple[str | None, list[int], SamplingParams]]) -> list[Any]:
    """Run all requests in mixed batches, two more after each step. Returns tokens and text of each."""
    waiting, finished = list(enumerate(requests)), dict[int, list[RequestOutput]]()
    while waiting or engine.has_unfinished_requests:
        for number, (adapter, prompt, params) in waiting[:2]:
            engine.add_request(prompt, params, str(number), adapter=adapter)
        del waiting[:2]
        for output in engine.step():
            if output.finished:
                finished.setdefault(int(output.request_id), []).append(output)
        engine.assert_consistent()
    assert engine.num_free_blocks == engine.num_blocks, "blocks leaked"
    return [sorted(finished[number], key=lambda output: output.index) for number in range(len(requests))]


def get_texts(outputs: list[list[RequestOutput]], *, with_logprobs: bool) -> list[list[tuple[Any, ...]]]:
    return [
        [(each.token_ids, each.text, each.finish_reason, each.logprobs if with_logprobs else None) for each in some]
        for some in outputs
    ]


def make_engine(own: Path, adapters: Mapping[str, Path], config: EngineConfig, *, shares: bool = True) -> LLMEngine:
    """Make an engine with a cache of `NUM_BLOCKS` blocks. `shares`: the adapters share the base's weights, as in
    operation; else each has its merged model."""
    loaded = load_model(own, config, has_adapters=True)
    resident = [loaded]
    for path in adapters.values():
        resident.append(load_adapter(path, config, resident) if shares else load_model(path, config))
    format_ = get_kv_cache_format(config.kv_cache_dtype, loaded.model.dtype)
    block_bytes = get_bytes_per_block(get_layer_shapes(loaded.config), config.block_size or 0, format_)
    config = config.model_copy(update={"kv_cache_bytes": NUM_BLOCKS * block_bytes})
    with make_drafts_free():
        return LLMEngine(loaded, config, adapters=dict(zip(adapters, resident[1:], strict=True)))


def check_equal_to_merged(
    base: Path, adapters: Mapping[str, Path], config: EngineConfig, own: Path | None = None
) -> tuple[LLMEngine, Counter[str]]:
    """Assert that mixed batches give the text and log-probabilities of the merged models in the same batches, and in
    float32 also the text of each merged model alone: in bfloat16 a chunk's length may decide between close logits.
    Returns the engine and the counts of events."""
    requests: list[tuple[str | None, list[int], SamplingParams]] = [*make_requests(adapters)]
    requests += [(None, prompt, replace_exit(params, own)) for _, prompt, params in requests[:2]]
    engine = make_engine(own or base, adapters, config)
    mixed = run_mixed(engine, requests)
    merged = run_mixed(make_engine(own or base, adapters, config, shares=False), requests)
    assert get_texts(mixed, with_logprobs=True) == get_texts(merged, with_logprobs=True)
    if config.dtype == "float32":
        for name, path in [*adapters.items(), (None, own or base)]:
            alone = make_engine(path, {}, config.model_copy(update={"max_num_batched_tokens": 2048}))
            for request, outputs in zip(requests, mixed, strict=True):
                if request[0] == name:
                    found = run_mixed(alone, [(None, *request[1:])])
                    assert get_texts([outputs], with_logprobs=False) == get_texts(found, with_logprobs=False)
    seen: Counter[str] = Counter(preemptions=engine.state.num_preemptions)
    for output in (output for outputs in mixed for output in outputs):
        seen += Counter(
            cached=output.num_cached_tokens,
            accepted=output.num_accepted_tokens,
            rejected=output.num_draft_tokens - output.num_accepted_tokens,
        )
    return engine, seen


def replace_exit(params: SamplingParams, own: Path | None) -> SamplingParams:
    """Return the parameters of a request to the engine's own model; a dense one has no exit head."""
    return params if own else dataclasses.replace(params, early_exit=EarlyExit("off"))


def count_bytes(engine: LLMEngine) -> tuple[int, int]:
    """Return the bytes of the engine's own model, and of all models together."""
    base = map_weight_bytes_by_address(engine._base.model)
    everything = dict(base)
    for model in engine.adapters.values():
        everything |= map_weight_bytes_by_address(model.loaded.model)
    return sum(base.values()), sum(everything.values())


def check_memory(engine: LLMEngine, adapters: Mapping[str, Path]) -> tuple[int, int]:
    """Check that adapters take the memory of their own files; return what `count_bytes` does."""
    own_bytes, all_bytes = count_bytes(engine)
    size = sum(file.stat().st_size for path in adapters.values() for file in path.glob("*.safetensors"))
    assert all_bytes <= own_bytes + 1.2 * size
    return own_bytes, all_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", ["base", "adapter"])
def test_ten_adapters_give_the_text_of_their_merged_models_in_the_memory_of_their_tensors(
    own: str, dtype: str, tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", dtype)
    adapters = save_adapters(base, tmp_path, 10)
    first = save_adapter(base, tmp_path / "first", seed=77) if own == "adapter" else None
    engine, seen = check_equal_to_merged(base, adapters, EngineConfig(**SMALL, dtype=dtype), first)
    assert all(seen[kind] for kind in ("preemptions", "cached", "accepted", "rejected")), seen
    own_bytes, all_bytes = check_memory(engine, adapters)
    setup, config = ServingSetup(memory_bytes=1 << 30, sequence_length=64, weights_dtype=dtype), adapters["a0"]
    plans = [plan_serving(config, dataclasses.replace(setup, num_adapters=count)).swiftkv for count in (0, 10)]
    assert plans[1].weights_bytes - plans[0].weights_bytes == pytest.approx(all_bytes - own_bytes, rel=0.1)
    whole = sum(map_weight_bytes_by_address(load_model(adapters["a0"], EngineConfig()).model).values())
    assert all_bytes < own_bytes + 10 * 0.5 * whole, "the base is shared"


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"dtype": "float32"}, {}),
    "no-kernels-int8": ({"native_kernels": False, "weights": "int8"}, {}),
    "not-fused": ({"fuse_weights": False}, {}),
    "int8": ({"weights": "int8"}, {}),
    "int4": ({"weights": "int4"}, {}),
    "int8-cache": ({"kv_cache_dtype": "int8"}, {}),
    "own": ({}, {"decode_key_value": "own"}),
    "own-output": ({}, {"own_output_projection": True}),
    "bypassing-tail": (
        {},
        {"prefill_layers": [0, 2], "num_key_value_layers": None, "decode_key_value": "own", "deep_tail": 4},
    ),
}
"""Options of engine and student."""


@pytest.mark.parametrize("name", few(OPTIONS, ("float32", "no-kernels-int8", "int4", "own", "bypassing-tail")))
def test_options_change_no_text(name: str, tmp_path: Path) -> None:
    options, shape = OPTIONS[name]
    base = save_base(tmp_path / "base")
    adapters = save_adapters(base, tmp_path, 3, **shape)
    check_equal_to_merged(base, adapters, EngineConfig(**SMALL | options), adapters.pop("a0"))


@pytest.mark.parametrize("family", few(FAMILY_CONFIGS))
def test_every_family_shares_its_base(family: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", family=family)
    adapters = save_adapters(base, tmp_path, 2)
    check_memory(check_equal_to_merged(base, adapters, EngineConfig(**SMALL))[0], adapters)


CHANGED = [
    "layers.0.self_attn.q_proj",
    "layers.1.mlp.up_proj",
    "layers.3.self_attn.o_proj",
    "norm.weight",
    "embed_tokens",
]
"""Names of tensors that adapters replace: parts of fused projections, whole modules, vectors, tied embeddings."""


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_replaced_tensors_are_the_adapters_own(family: str, tmp_path: Path) -> None:
    """Adapters share what they keep with each other where the engine's own model has replaced it."""
    base = save_base(tmp_path / "base", family=family)
    changed = [name for name in CHANGED if not (family == "mixtral" and "mlp" in name)]
    changed += ["experts.gate_up_proj"] if family == "mixtral" else ["lm_head"] if family == "mistral" else []
    adapters = {
        f"a{i}": save_adapter(base, tmp_path / f"a{i}", seed=i, changed=name) for i, name in enumerate(changed, 1)
    }
    first = save_adapter(base, tmp_path / "first", seed=9, changed="layers.3.self_attn.o_proj")
    for own in (None, first):
        check_equal_to_merged(base, adapters, EngineConfig(**SMALL), own)


def test_what_the_own_model_replaced_is_shared_by_the_others(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    first = save_adapter(base, tmp_path / "first", seed=9, changed="mlp")
    adapters = save_adapters(base, tmp_path, 3)
    engine = LLMEngine.from_pretrained(first, EngineConfig(**SMALL), adapters={"a0": adapters["a0"]})
    _, one = count_bytes(engine)
    for name in ("a1", "a2"):
        engine.add_adapter(name, engine.load_adapter(adapters[name]))
    _, three = count_bytes(engine)
    size = sum(file.stat().st_size for file in adapters["a0"].glob("*.safetensors"))
    assert three - one <= 2 * 1.2 * size
    engine.remove_adapter("a0")  # the weights that the others share with it stay
    assert count_bytes(engine)[1] > one
    requests = [(name, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)) for name in ("a1", "a2", None)]
    assert all(outputs[0].finished for outputs in run_mixed(engine, requests))


def test_adapters_come_and_go_without_their_base_being_read(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapters = save_adapters(base, tmp_path, 2)
    engine = LLMEngine.from_pretrained(base, EngineConfig(**SMALL, dtype="float32"), adapters={})
    own_bytes, _ = count_bytes(engine)
    base.rename(tmp_path / "away")
    texts, params = [], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for name in ("a0", "a1", "a0"):
        engine.add_adapter("x", loaded := engine.load_adapter(adapters[name]))
        memory = weakref.ref(loaded.model.model.layers[3].self_attn)
        del loaded
        texts.append(engine.generate([[5, 6, 7] * 5], params, adapter="x")[0].token_ids)
        assert texts[-1] == engine.generate([[5, 6, 7] * 5], params, adapter="x")[0].token_ids
        engine.remove_adapter("x")
        gc.collect()
        assert memory() is None
        assert count_bytes(engine)[1] == own_bytes
    assert texts[0] == texts[2] != texts[1], "a name that is used again never reads blocks of the previous adapter"
    with pytest.raises(InvalidInputError, match=r"adapter is 'x'; loaded adapters: none"):
        engine.add_request([1], adapter="x")


def test_prefixes_are_reused_within_an_adapter_only(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    adapters = save_adapters(base, tmp_path, 2)
    engine = LLMEngine.from_pretrained(base, EngineConfig(**SMALL), adapters=adapters)
    counts = []
    for adapter in ("a0", "a1", None, "a0", "a1", None):
        (output,) = engine.generate([list(range(20))], SamplingParams(max_tokens=2, ignore_eos=True), adapter=adapter)
        counts.append(output.num_cached_tokens)
    assert counts[:3] == [0, 0, 0]
    assert min(counts[3:]) > 0


def test_adapters_whose_files_look_the_same_share_no_prefixes(tmp_path: Path) -> None:
    """As files of an archive or image, which all have one modification time."""
    base = save_base(tmp_path / "base")
    adapters = save_adapters(base, tmp_path, 2)
    for directory in adapters.values():
        (directory / "config.json").write_bytes((adapters["a0"] / "config.json").read_bytes())
        for file in directory.glob("*.safetensors"):
            os.utime(file, (1, 1))
    engine = LLMEngine.from_pretrained(base, EngineConfig(**SMALL), adapters=adapters)
    prompt = [*range(3, 15)]
    for name in adapters:
        [output] = engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True), adapter=name)
        assert output.num_cached_tokens == 0, name


def test_a_running_adapter_is_not_removed(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    engine = LLMEngine.from_pretrained(base, EngineConfig(**SMALL), adapters=save_adapters(base, tmp_path, 1))
    engine.add_request([1, 2], SamplingParams(max_tokens=3, n=2), adapter="a0")
    with pytest.raises(AssertionError, match="'a0' has unfinished requests"):
        engine.remove_adapter("a0")


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base, other = save_base(tmp_path / "base"), save_base(tmp_path / "other", seed=4)
    first = save_adapter(base, tmp_path / "first", seed=1)
    engine = LLMEngine.from_pretrained(first, EngineConfig(**SMALL), adapters={})
    digests = [read_adapter(first), read_adapter(save_adapter(other, tmp_path / "foreign", seed=2))]
    foreign, own = (each.base.digest for each in reversed(digests) if each is not None)
    with pytest.raises(ModelError, match=rf"other' with digest {foreign}, but the resident base is .*base' .* {own};"):
        engine.load_adapter(tmp_path / "foreign")
    wider = save_adapter(base, tmp_path / "wider", seed=2, num_key_value_layers=3)
    with pytest.raises(ModelError, match=r"'num_key_value_layers': 3,.* but the served .*'num_key_value_layers': 2"):
        engine.load_adapter(wider)
    float32 = convert(base, **SHAPE).float()
    export_adapter(save(float32, tmp_path / "float32-full"), tmp_path / "float32", base=base)
    with pytest.raises(ModelError, match=r"dtype is torch.float32, but that of the served model is torch.bfloat16"):
        engine.load_adapter(tmp_path / "float32")
    with pytest.raises(ModelError, match=r"which has no swiftkv_adapter\.json"):
        engine.load_adapter(base)
    engine.add_adapter("a", engine.load_adapter(first))
    with pytest.raises(InvalidInputError, match="'a' is loaded already"):
        engine.add_adapter("a", engine.load_adapter(first))
    with pytest.raises(InvalidInputError, match="made without adapters"):
        LLMEngine.from_pretrained(base, EngineConfig(**SMALL)).load_adapter(first)
    for options, message in (
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but adapters need 1"),
        ({"swiftkv": False}, "swiftkv is false"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            LLMEngine.from_pretrained(base, EngineConfig(**SMALL | options), adapters={})


@pytest.mark.parametrize(("limit", "num_loaded"), [(None, 1), (400_000, 0), (400_000, 1)])
def test_the_cache_leaves_the_memory_that_adapters_may_take(
    limit: int | None, num_loaded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base")
    adapters = save_adapters(base, tmp_path, num_loaded)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    config = EngineConfig(block_size=4, max_adapter_bytes=limit)
    engine = LLMEngine.from_pretrained(base, config, adapters=adapters)
    own, everything = count_bytes(engine)
    reserved = 0 if limit is None else limit - (everything - own)
    block = 4 * sum(2 * shape.num_heads * shape.dim * 2 for shape, _ in get_layer_shapes(engine.model_config))
    assert engine.num_blocks == (1_000_000 - reserved) // FREE_MEMORY_DIVISOR // block


def test_a_base_in_fp8_is_shared(tmp_path: Path) -> None:
    save_fp8(tmp_path / "base", ROWS)
    adapters = {}
    for seed in (1, 2, 3):
        full = tmp_path / f"full-{seed}"
        convert_checkpoint(tmp_path / "base", full, **SHAPE)
        for file in full.glob("swiftkv*.safetensors"):
            torch.manual_seed(seed)
            tensors = {name: each + 0.05 * torch.randn_like(each.float()) for name, each in load_file(file).items()}
            save_file({name: each.to(torch.bfloat16) for name, each in tensors.items()}, file)
        export_adapter(full, adapters.setdefault(f"a{seed}", tmp_path / f"a{seed}"), base=tmp_path / "base")
    check_memory(check_equal_to_merged(tmp_path / "base", adapters, EngineConfig(**SMALL))[0], adapters)
