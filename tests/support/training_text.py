"""Training text in files and the rows that a job makes of it, for tests of the data pipeline."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import DataSpec
from tests.support.fakes.tokenizers import BOS, EOS, byte_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turns(*contents: str) -> list[dict[str, str]]:
    """Return messages of the user and the assistant, in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


TALK = turns("ask", "say", "more", "no")
NUMBERED = [{"text": f"document {i}"} for i in range(100)]

Write = Callable[..., str]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Function that writes rows in the format of the file's name, or a string as it is, and returns the path."""

    def write_file(content: str | bytes | list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list) and name.endswith(".parquet"):
            datasets.Dataset.from_list(content).to_parquet(path)
        else:
            if isinstance(content, list):
                content = "".join(json.dumps(row) + "\n" for row in content)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file


def prepare(
    *sources: str | dict[str, Any],
    seed: int = 0,
    template: str | None = None,
    tokenizer: Any = None,
    remote: Any = None,
    directory: Path | None = None,
    mask_prompts: bool = False,
    with_steering: bool = False,
    share_prefixes: bool = False,
    access: Access = UNRESTRICTED,
    **settings: Any,
) -> PreparedData:
    entries = [{"name_or_path": source} if isinstance(source, str) else source for source in sources]
    spec = DataSpec(sources=entries, **{"max_length": 64, "validation_fraction": 0.0, **settings})
    directory = directory or Path(tempfile.mkdtemp(prefix="rows-"))
    tokenizer = tokenizer or byte_tokenizer(chat_template=template, add_bos_token=True)
    return prepare_data(
        spec,
        tokenizer,
        directory,
        seed=seed,
        remote=remote,
        mask_prompts=mask_prompts,
        with_steering=with_steering,
        share_prefixes=share_prefixes,
        access=access,
    )


def texts(rows: PackedRows) -> list[str]:
    """Return each sample as text, `^` for BOS, `$` for EOS, sorted."""
    return sorted(_text(tokens) for tokens, _ in samples_of(rows))


def targets(rows: PackedRows) -> list[str]:
    """Return the tokens that each sample is trained to predict, as text, sorted."""
    return sorted(_text(tokens[1:][counts[:-1]]) for tokens, counts in samples_of(rows))


def samples_of(rows: PackedRows) -> list[tuple[Any, Any]]:
    """Return (token ids, loss mask) of each sample."""
    samples = rows.samples
    spans = (slice(samples.starts[member], samples.starts[member + 1]) for member in rows.members)
    return [(samples.tokens[span], samples.loss_mask[span]) for span in spans]


def _text(tokens: Any) -> str:
    tokenizer = byte_tokenizer()
    return "".join({BOS: "^", EOS: "$"}.get(i) or tokenizer.decode([i]) for i in tokens.tolist())
