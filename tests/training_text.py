"""Training text as files, and what a job makes of it, for the tests of the data pipeline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.specs import DataSpec
from tests.fakes.tokenizers import byte_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "say"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]
NUMBERED = [{"text": f"document {i}"} for i in range(100)]

Write = Callable[..., str]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows as JSON Lines, or a string as it is, and returns the path."""

    def write_file(content: str | bytes | list[dict[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file


def spec(*sources: str | dict[str, Any], **settings: Any) -> DataSpec:
    entries = [{"name_or_path": source} if isinstance(source, str) else source for source in sources]
    return DataSpec(sources=entries, **{"max_length": 64, "validation_fraction": 0.0, **settings})


def prepare(
    *sources: str | dict[str, Any], seed: int = 0, template: str | None = None, **settings: Any
) -> PreparedData:
    tokenizer = byte_tokenizer(chat_template=template)
    return prepare_data(spec(*sources, **settings), tokenizer, new_directory(), seed=seed)


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="rows-"))
