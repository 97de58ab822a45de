"""Loading of a model directory or hub id as a model and its tokenizer, ready for inference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from swiftkv_platform.configs.adapter import ADAPTER_FILE
from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.adapters import WeightsOrigin, open_adapter_model, read_origin, read_resident_adapter
from swiftkv_platform.engine.integer_weights import attach_stored_integers, drop_integer_weights, quantize_weights
from swiftkv_platform.engine.native_layers import NativeLinear
from swiftkv_platform.engine.ranks import TensorParallelGroup, get_rank_device
from swiftkv_platform.engine.sharding import check_divisible, load_shard
from swiftkv_platform.engine.weights import align_weights, fuse_weights, use_kernels
from swiftkv_platform.errors import ModelError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.causal_lm import get_student_classes  # registers the SwiftKV classes with the Auto classes
from swiftkv_platform.model.configuration import read_config, read_generation_config
from swiftkv_platform.model.conversion import resolve_dense_model
from swiftkv_platform.model.decoder import LENGTH_DEPENDENT_ROPE, read_rope_parameters
from swiftkv_platform.model.tokenizers import find_highest_token_id, get_end_ids, has_tokenizer, load_tokenizer
from swiftkv_platform.model.weights.adapters import FindBase
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.loading import resolve_tied_head
from swiftkv_platform.model.weights.quantization import BITS, is_quantized
from swiftkv_platform.sources.model_directories import fetch_model_directory
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.student_shape import LayerMap, StudentShape


@dataclass(frozen=True)
class ModelDescription:
    """The parts of a checkpoint that request processing needs, without weights."""

    config: Any
    """transformers' configuration of the served model. For a teacher or a dense model, l is the number of layers."""
    tokenizer: Any | None
    """None if the directory has no tokenizer. Then only prompts of token ids are served."""
    eos_token_ids: frozenset[int]
    context_length: int
    """Max tokens of prompt and output together: `max_model_len`, or the model's `max_position_embeddings`."""

    @cached_property
    def num_token_ids(self) -> int:
        """Ids below this one may be generated. Embeddings that are padded to a round size have further rows, which no
        token of the tokenizer has."""
        vocab_size: int = self.config.get_text_config().vocab_size
        if self.tokenizer is None:
            return vocab_size
        return min(max(find_highest_token_id(self.tokenizer)[1], *self.eos_token_ids, 0) + 1, vocab_size)

    @property
    def operators(self) -> str:
        """What computes the model, such as `native kernels (AVX2), bfloat16`; empty for a model of another engine."""
        return ""

    @property
    def has_exit_head(self) -> bool:
        return StudentShape.from_config(self.config).has_exit_head

    @property
    def deep_tail(self) -> int | None:
        """As in `LayerMap`; None for a model of another engine."""
        layer_map: LayerMap | None = getattr(self.config, "layer_map", None)
        return None if layer_map is None else layer_map.deep_tail


@dataclass(frozen=True)
class LoadedModel(ModelDescription):
    """A checkpoint that the native engine can run."""

    model: PreTrainedModel
    digest: str
    """Digest that identifies the weights, for the hashes of cached blocks."""
    origin: WeightsOrigin | None = None
    """Origin of the weights, if adapters may share them."""

    @cached_property
    def operators(self) -> str:
        return describe_operators(self.model)


def load_model(
    path: str | Path,
    config: EngineConfig,
    ranks: TensorParallelGroup | None = None,
    *,
    weights: Path | None = None,
    has_adapters: bool = False,
) -> LoadedModel:
    """Load a Hugging Face directory or hub id, SwiftKV or not. Raises `ModelError`: the checkpoint cannot be read, or
    `max_model_len` exceeds its context.

    Args:
        ranks: load only this rank's part.
        weights: directory with the weights, if it is not `path` (an adapter assembled with its base).
        has_adapters: keep what `load_adapter` needs.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    directory = fetch_model_directory(str(path), field="model")
    model = _read_model(weights or directory, config, ranks)
    origin = WeightsOrigin.from_model(model, read_origin(directory, model.config)) if has_adapters else None
    context_length = _get_context_length(path, model.config, config)
    device = None if ranks is None else ranks.device
    return _prepare_loaded(directory, model, config, context_length, device, origin)


def load_adapter(
    path: str | Path, config: EngineConfig, residents: Sequence[LoadedModel], find_base: FindBase | None = None
) -> LoadedModel:
    """Load an adapter, which shares the weights of its base with the resident models.

    Args:
        residents: loaded models of the same base, with their origins.
        find_base: see `open_merged_model`.

    Raises:
        ModelError: as `read_resident_adapter` and `open_adapter_model`, or the adapter has another dtype or another
            layout of the KV cache than the first resident model.
    """
    directory, first = fetch_model_directory(str(path), field="adapters"), residents[0]
    assert first.origin is not None, "the first model was loaded without has_adapters"
    adapter = read_resident_adapter(directory, first.origin.adapter)
    model_config: Any = read_config(directory, field="adapters")
    adapter.check_shape(model_config.to_dict(), str(directory))
    _check_same_layout(directory, model_config, config, first)
    origins = [(each.model, each.origin) for each in residents if each.origin is not None]
    opened = open_adapter_model(directory, model_config, adapter, origins, dtype=first.model.dtype, find_base=find_base)
    with opened as (model, checkpoint):
        if config.weights != "bfloat16" and is_quantized(model_config):
            attach_stored_integers(model, checkpoint)
        origin = WeightsOrigin.from_model(model, adapter)
        context_length = _get_context_length(path, model_config, config)
        return _prepare_loaded(directory, model, config, context_length, first.model.device, origin, is_adapter=True)


def _check_same_layout(directory: Path, model_config: Any, config: EngineConfig, resident: LoadedModel) -> None:
    """Raise `ModelError` unless the adapter's dtype and KV cache are those of the resident model."""
    own, shared = StudentShape.from_config(model_config), StudentShape.from_config(resident.config)
    is_dense = shared == StudentShape.dense(resident.config.num_hidden_layers)
    if own != shared and not (is_dense and own.num_key_value_heads_swiftkv is None):
        raise ModelError.for_field(
            "adapters",
            str(directory),
            f", a student of the shape {own.to_config()}, but the served model has the shape {shared.to_config()}: one "
            "KV cache serves all adapters; deploy students of another shape separately",
        )
    if config.dtype == "auto" and model_config.dtype != resident.config.dtype:
        raise ModelError.for_field(
            "adapters",
            str(directory),
            f", whose dtype is {model_config.dtype}, but that of the served model is {resident.config.dtype}; set the "
            "engine's dtype, or export the adapter in the same dtype",
        )


def _prepare_loaded(
    directory: Path,
    model: PreTrainedModel,
    config: EngineConfig,
    context_length: int,
    device: Any,
    origin: WeightsOrigin | None,
    *,
    is_adapter: bool = False,
) -> LoadedModel:
    tokenizer = _read_tokenizer(directory, model.config)
    _pin_short_rotary_factors(model, context_length)
    return LoadedModel(
        config=model.config,
        tokenizer=tokenizer,
        eos_token_ids=_find_eos_token_ids(model.generation_config, model.config, tokenizer),
        context_length=context_length,
        model=prepare_model(model, config, device, is_adapter=is_adapter),
        digest=_compute_digest(directory),
        origin=origin,
    )


def describe_model(directory: Path, config: EngineConfig) -> ModelDescription:
    """Read a Hugging Face directory without its weights, for vLLM. Raises `ModelError` as `load_model`."""
    model_config, generation = read_served_config(directory, config), directory / GENERATION_CONFIG_NAME
    generation_config = read_generation_config(generation if generation.is_file() else None, directory, field="model")
    tokenizer = _read_tokenizer(directory, model_config)
    return ModelDescription(
        config=model_config,
        tokenizer=tokenizer,
        eos_token_ids=_find_eos_token_ids(generation_config, model_config, tokenizer),
        context_length=_get_context_length(directory, model_config, config),
    )


def read_served_config(directory: Path, config: EngineConfig) -> Any:
    """Read the configuration of the served model, student or teacher. Raises `ModelError`."""
    model_config: Any = read_config(directory, field="model", any_family=True)
    if any((directory / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        resolve_tied_head(model_config, Checkpoint.open(directory))
    if not (config.swiftkv and model_config.model_type.endswith("_swiftkv")):
        vars(model_config).update(StudentShape.dense(model_config.num_hidden_layers).to_config())
    return model_config


def check_tensor_parallel_size(path: str | Path, config: EngineConfig) -> None:
    """Raise `ModelError` if `tensor_parallel_size` does not divide the model, or there are too few devices."""
    directory = fetch_model_directory(str(path), field="model")
    check_divisible(read_config(directory, field="model"), config.tensor_parallel_size)
    get_rank_device(config, 0)


def _read_model(directory: Path, config: EngineConfig, ranks: TensorParallelGroup | None) -> PreTrainedModel:
    """Load a student, or a dense model in the student's classes, where every layer computes its own KV."""
    model_class: Any
    model_config = read_config(directory, field="model")
    if config.swiftkv and model_config.model_type.endswith("_swiftkv"):
        model_class = get_student_classes(model_config.model_type.removesuffix("_swiftkv")).causal_lm
    else:
        model_class, model_config = resolve_dense_model(directory)
    model: PreTrainedModel
    if ranks is None:
        model = model_class.from_pretrained(directory, config=model_config, dtype=config.dtype)
    else:
        model = load_shard(directory, model_class, model_config, dtype=config.dtype, ranks=ranks, device=ranks.device)
    model.eval()
    if config.weights != "bfloat16" and is_quantized(model_config) and not (directory / ADAPTER_FILE).is_file():
        attach_stored_integers(model, Checkpoint.open(directory), ranks)
    return model


def _compute_digest(directory: Path) -> str:
    """Return a SHA-256 that changes with the weights: of the artifact's manifest; else of the configuration and the
    paths, sizes and modification times of the weight files."""
    digest = hashlib.sha256()
    manifest = directory / "manifest.json"
    if manifest.is_file():
        digest.update(manifest.read_bytes())
        return digest.hexdigest()
    digest.update((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        status = file.stat()
        digest.update(f"{file.resolve()}/{status.st_size}/{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _read_tokenizer(directory: Path, model_config: Any) -> Any | None:
    if not has_tokenizer(directory):
        return None
    return load_tokenizer(directory, model_config.get_text_config().vocab_size, field="model")


def _get_context_length(path: str | Path, model_config: Any, config: EngineConfig) -> int:
    length = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ModelError(
            "config.json has no max_position_embeddings; set max_model_len to the model's context",
            field="max_model_len",
            value=None,
        )
    if config.max_model_len is not None and config.max_model_len > length:
        raise ModelError.for_field("max_model_len", config.max_model_len, f"; model {str(path)!r} accepts 2..{length}")
    return config.max_model_len or length


def _pin_short_rotary_factors(model: Any, max_model_len: int) -> None:
    """Use RoPE's factors of short sequences always. transformers would choose them by each batch's longest sequence.

    Cached keys contain the factors with which they were computed. A sequence that outgrows the limit would have to
    recompute all its keys, which the engine does not do. So longer contexts raise `ModelError`.
    """
    for kind, rope in read_rope_parameters(model.config).items():
        rope_type = rope.get("rope_type")
        if rope_type == "longrope" and max_model_len > rope["original_max_position_embeddings"]:
            longest = rope["original_max_position_embeddings"]
            raise ModelError(
                f"max_model_len is {max_model_len}; this model's LongRoPE has other rotary factors for sequences of "
                f"more than {longest} tokens, and the engine cannot switch between them: set max_model_len to "
                f"{longest} or less",
                field="max_model_len",
                value=max_model_len,
            )
        if rope_type in LENGTH_DEPENDENT_ROPE:  # so that transformers keeps its initial factors
            rotary_emb = model.model.rotary_emb
            rotary_emb.rope_type = "default" if kind is None else {**rotary_emb.rope_type, kind: "default"}


def _find_eos_token_ids(generation_config: Any, model_config: Any, tokenizer: Any | None) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation config, the model config or the tokenizer: the first that has
    any."""
    candidates = (
        getattr(generation_config, "eos_token_id", None),
        getattr(model_config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    return get_end_ids(next((candidate for candidate in candidates if candidate is not None), None))


def prepare_model(
    model: PreTrainedModel, config: EngineConfig, device: Any = None, *, is_adapter: bool = False
) -> PreTrainedModel:
    """Move a model to its device, and round and lay out its weights for inference. `is_adapter`: some of its weights
    are those of a prepared model. Raises `ModelError`."""
    # 1. choose the device
    device = device or config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is 'cuda', but torch sees no GPU; 'auto' and 'cpu' are accepted", field="device")
    if config.weights in BITS and torch.device(device).type != "cpu":
        raise ModelError.for_field(
            "weights", config.weights, ", but the device is a GPU, which accepts auto or bfloat16"
        )
    module: torch.nn.Module = model  # nn.Module's `to` is typed, transformers' wrapper is not
    module.to(device)
    # 2. choose the operators, and round the weights
    unsupported = _find_unsupported_option(model, config)
    problem = kernels.find_kernel_obstacle() if unsupported is None else unsupported
    if config.weights in BITS:
        quantize_weights(model, config.weights)
    if problem is not None:
        _widen_slow_dtype(model, config)
    # 3. fuse and pack weights, and use the native kernels
    if problem is not None:
        drop_integer_weights(model)
    if config.fuse_weights:
        fuse_weights(model, native=problem is None, is_adapter=is_adapter)
    if problem is None:
        use_kernels(model)
    align_weights(model)
    if model.device.type == "cpu":
        _log_operators(model, config, problem, is_slow=unsupported is None or config.weights in BITS)
    return model


def _find_unsupported_option(model: Any, config: EngineConfig) -> str | None:
    """Return which option, dtype or device excludes the native kernels, or None. Compiles nothing."""
    if model.device.type != "cpu":
        return "the model is on a GPU"
    if not config.native_kernels:
        return "native_kernels is false"
    if not config.fuse_weights:
        return "fuse_weights is false"
    if model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"the model's dtype is {dtype}; dtype 'bfloat16' uses the native kernels and half the memory"
    return None


def _widen_slow_dtype(model: Any, config: EngineConfig) -> None:
    """Convert a model with `dtype: auto` to float32 if PyTorch multiplies matrices of its dtype on this CPU without
    vector instructions, which takes several times as long."""
    if config.dtype != "auto" or model.device.type != "cpu":
        return
    if model.dtype in (torch.bfloat16, torch.float16) and not has_fast_products(model.dtype):
        model.float()


def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of bfloat16 or float16 with instructions of this CPU."""
    mkldnn = torch.ops.mkldnn
    is_supported = mkldnn._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported
    return bool(is_supported())


def _log_operators(model: Any, config: EngineConfig, problem: str | None, *, is_slow: bool) -> None:
    """Log what computes a model and why. `is_slow`: this machine or rounded weights make it slow: a warning."""
    operators, log = describe_operators(model), get_logger()
    if problem is None:
        log.info("cpu_operators", operators=operators, reason="they are the fastest for this processor")
        return
    reason = f"no native kernels: {problem}"
    if config.weights in BITS:
        reason += (
            f"; weights {config.weights!r} are rounded but multiplied as floats, which saves no time: use weights "
        )
        reason += "'auto'"
    (log.warning if is_slow else log.info)("cpu_operators", operators=operators, reason=reason)


def describe_operators(model: Any) -> str:
    """As `ModelDescription.operators`, for a prepared model."""
    dtype = str(model.dtype).removeprefix("torch.")
    packed = [module for module in model.modules() if isinstance(module, NativeLinear)]
    if not packed:
        return f"PyTorch, {dtype}"
    integers = sorted({form for module in packed if (form := module.weight.integer_form) is not None})
    return ", ".join([f"native kernels ({kernels.describe_instructions()})", dtype, *integers])
