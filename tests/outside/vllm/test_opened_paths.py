"""Files that vLLM opens because of a model's files: a list of all such calls, and a model that names another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from swiftkv_platform.sources.model_directories import create_model_view
from swiftkv_platform.vllm import register
from tests.support.opened_paths import compare, opening_calls

LISTED = "0.32"
"""Version that the list is of."""
VLLM = (
    *("transformers_utils/*.py", "transformers_utils/configs/speculators/*.py", "tokenizers/*.py", "renderers/hf.py"),
    *("config/model.py", "config/load.py", "config/lora.py", "config/speculative.py", "config/vllm.py"),
    *("engine/arg_utils.py", "model_executor/model_loader/*.py", "model_executor/layers/quantization/*.py"),
    *("model_executor/models/config.py", "model_executor/models/registry.py", "lora/*.py"),
    *(f"model_executor/models/{name}.py" for name in ("llama", "mixtral", "qwen2", "qwen3", "granite")),
    *(f"model_executor/models/{name}.py" for name in ("phi3", "gemma3", "qwen3_moe", "deepseek_v2")),
)
"""Modules that read a model's directory."""
LIST = Path(__file__).with_name("opened_by_vllm.txt")


@pytest.mark.skipif(tuple(map(int, vllm.__version__.split(".")[:2])) < (0, 32), reason="the list is of a newer version")
def test_vllm_opens_nothing_that_is_not_known() -> None:
    compare(opening_calls(Path(vllm.__path__[0]), VLLM), LIST)


def test_vllm_follows_no_name_in_a_model_of_which_it_gets_a_view(llama: Path, tmp_path: Path) -> None:
    directory, other = tmp_path / "model", tmp_path / "other"
    directory.mkdir()
    for path in llama.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "config.json").unlink()
    config = json.loads((llama / "config.json").read_text())
    names = {"_name_or_path": str(other), "tokenizer": str(other), "auto_map": {"AutoConfig": f"{other}--a.B"}}
    (directory / "config.json").write_text(json.dumps({**config, **names}))
    for name in ("params.json", "modules.json", "hf_quant_config.json"):
        (directory / name).write_text(json.dumps({"path": str(other)}) if name != "modules.json" else "[]")
    view = create_model_view(directory, tmp_path / "views")
    register()
    found = EngineArgs(model=str(view), dtype="float32").create_model_config()
    assert found.model == str(view)
    assert str(other) not in json.dumps(found.hf_config.to_dict(), default=str)
