"""Published instruction data, where a copy lies beside the repository, as tests without network cannot fetch it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

import swiftkv_platform.sources
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.specs import DataSpec

DATA = Path(__file__).parents[4] / "shared" / "data" / "instruct"
TEACHER = Path(swiftkv_platform.sources.__path__[0]) / "teacher"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs {DATA}")
@pytest.mark.parametrize(
    ("name", "format_", "rows"),
    [
        ("gsm8k_test.jsonl", "prompt_completion", 1319),
        ("alpaca_en_demo.json", "alpaca", 999),
        ("glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("dpo_en_demo.json", "sharegpt", 300),
    ],
)
def test_published_files_are_read_whole(name: str, format_: str, rows: int, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    tokenizer.chat_template = TEMPLATE
    spec = DataSpec.model_validate({"sources": [{"name_or_path": str(DATA / name)}], "max_length": 1024})
    data = prepare_data(spec, tokenizer, tmp_path, seed=0)
    (source,) = data.statistics.sources
    assert source.formats == {format_: rows}
    assert (source.dropped, source.documents) == (0, rows)
    assert data.statistics.train.packing_efficiency > 0.97
    assert len(data.held_out) > 0
