"""Hub models as directories of the local cache, with the files that loaders need and weights in one format only."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.errors import ModelError
from swiftkv_platform.sources.views import TOKENIZER_FILES

_TEXTS = ("*.json", "*.model", "*.spm", "*.tiktoken", "*.txt")
_FILES = ["*.safetensors", *_TEXTS, "*.jinja", "LICENSE*", "NOTICE*"]
_OTHER_COPIES = [*(f"*/{pattern}" for pattern in ("*.safetensors", *_TEXTS)), "consolidated*", "*.bin.index.json"]
"""Copies of the model in another format or precision. In subdirectories only chat templates are read."""
_PICKLES = ["pytorch_model*.bin", "pytorch_model*.bin.index.json"]


def local_directory(
    name: str, revision: str | None = None, *, field: str, subfolder: str = "", pickles: bool = False
) -> Path:
    """Return the directory `name`, or the cached directory of the hub model with this name, downloading missing files.

    Args:
        field: name of the field in messages.
        subfolder: directory within the repository, the only one that is fetched.
        pickles: whether to fetch pickles if there are no safetensors; otherwise such a model is refused.

    Raises:
        ModelError: neither a directory nor a hub model that can be fetched, or a model without usable weights.
    """
    if Path(name).is_dir():
        return Path(name) / subfolder

    def fetch(files: list[str], others: list[str]) -> Path:
        below = [[f"{subfolder}/{pattern}" if subfolder else pattern for pattern in each] for each in (files, others)]
        return _fetch(name, revision, field, *below) / subfolder

    directory = fetch(_FILES, _OTHER_COPIES)
    if not any(directory.glob("*.safetensors")) and pickles:
        fetch(_PICKLES, [])
    if not any(directory.glob("*.safetensors")) and not pickles:
        raise ModelError(
            f"{field} is {name!r}, which has no weights in safetensors; pickles (.bin) may run code when read: "
            "save it as safetensors",
            field=field,
            value=name,
        )
    return directory


def tokenizer_directory(name: str, revision: str | None = None, *, field: str) -> Path:
    """Return the directory `name`, or the cached directory with the tokenizer of the hub model with this name. Raises
    `ModelError`: neither a directory nor a hub model that can be fetched."""
    return Path(name) if Path(name).is_dir() else _fetch(name, revision, field, list(TOKENIZER_FILES), [])


def _fetch(name: str, revision: str | None, field: str, files: list[str], others: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=others))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        raise ModelError(
            f"{field} is {name!r}, neither a directory nor a model of the hub that this machine can reach "
            f"({str(error).splitlines()[0]})",
            field=field,
            value=name,
        ) from error
