"""Models of the hub as directories of its cache on this machine: what loaders read, and the weights once."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.errors import ModelError

_TEXTS = ("*.json", "*.model", "*.spm", "*.tiktoken", "*.txt")
_FILES = ["*.safetensors", *_TEXTS, "*.jinja", "LICENSE*", "NOTICE*"]
_OTHER_COPIES = [*(f"*/{pattern}" for pattern in ("*.safetensors", *_TEXTS)), "consolidated*", "*.bin.index.json"]
"""The model in another format or precision. Chat templates alone are read from directories within."""
_PICKLES = ["pytorch_model*.bin", "pytorch_model*.bin.index.json"]


def local_directory(
    name: str, revision: str | None = None, *, field: str, subfolder: str = "", pickles: bool = False
) -> Path:
    """The directory `name`, or that of the hub model of this name, fetched as far as it is not in the cache.

    Args:
        field: what messages call `name`.
        subfolder: directory within the repository, the only one that is fetched.
        pickles: whether the reader takes them where there are no safetensors; otherwise they are refused unfetched.

    Raises:
        ModelError: no directory, and no model that the hub gives, or one without weights that may be read.
    """
    if Path(name).is_dir():
        return Path(name) / subfolder
    from huggingface_hub import snapshot_download

    def fetch(files: list[str], others: list[str]) -> Path:
        below = [[f"{subfolder}/{pattern}" if subfolder else pattern for pattern in each] for each in (files, others)]
        found = snapshot_download(name, revision=revision, allow_patterns=below[0], ignore_patterns=below[1])
        return Path(found) / subfolder

    try:
        directory = fetch(_FILES, _OTHER_COPIES)
        if not any(directory.glob("*.safetensors")) and pickles:
            fetch(_PICKLES, [])
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        raise ModelError(
            f"{field} is {name!r}, neither a directory nor a model of the hub that this machine can reach "
            f"({str(error).splitlines()[0]})",
            field=field,
            value=name,
        ) from error
    if not any(directory.glob("*.safetensors")) and not pickles:
        raise ModelError(
            f"{field} is {name!r}, which has no weights in safetensors; pickles (.bin) may run code when read: "
            "save it as safetensors",
            field=field,
            value=name,
        )
    return directory
