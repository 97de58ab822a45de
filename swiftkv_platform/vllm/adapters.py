"""Adapters in vLLM: the base's weights follow the adapter's own, by vLLM's way to load a model from two places.

vLLM finds a base that is a directory or on the hub; for other names there is `swiftkv export`.
"""

from __future__ import annotations

from pathlib import Path

from vllm.config import ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from swiftkv_platform.configs.adapter import ADAPTER, AdapterConfig
from swiftkv_platform.errors import ModelError

BASE_PREFIX = "base_model/"
"""Prefix by which the base's tensors are told from the adapter's; no tensor's name has a slash."""
_UNREAD = ("s3://", "builtin:")


def adapter_of(model: ModelConfig) -> AdapterConfig | None:
    """The adapter that vLLM is to serve; None for a whole model. Raises `ModelError`: a damaged adapter, or one whose
    base vLLM cannot find."""
    document = get_hf_file_to_dict(ADAPTER, model.model, model.revision)
    if document is None:
        return None
    adapter = AdapterConfig.parse(document, model.model)
    adapter.check_shape(model.hf_config, model.model)
    check_readable(adapter.base.name_or_path, model.model)
    return adapter


def check_readable(name: str, source: str) -> None:
    """Raises `ModelError` for a base that is neither a directory nor a hub id."""
    is_missing = Path(name).is_absolute() and not Path(name).is_dir()
    if name.startswith(_UNREAD) or name.endswith(".gguf") or is_missing:
        raise ModelError(
            f"base.name_or_path is {name!r}, and vLLM reads a directory of this machine or a hub id; `swiftkv export "
            f"{source} WHOLE` makes a whole model, which is accepted (with --base DIRECTORY where the base has moved)",
            field="base.name_or_path",
            value=name,
        )


def base_weights(adapter: AdapterConfig) -> DefaultModelLoader.Source:
    """The base's weight files, as vLLM is told of them."""
    return DefaultModelLoader.Source(
        model_or_path=adapter.base.name_or_path, revision=adapter.base.revision, prefix=BASE_PREFIX
    )
