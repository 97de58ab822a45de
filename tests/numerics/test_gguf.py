"""Teachers in GGUF files convert to a directory with the same model, which everything else can load."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.jobs.worker.setup import resolve_teacher
from swiftkv_platform.model import convert_checkpoint
from swiftkv_platform.model.weights.bases import convert_gguf
from swiftkv_platform.sources import Access, Boundary
from swiftkv_platform.specs import ModelSpec
from tests.support.fakes.gguf import save_gguf
from tests.support.parameters import WIDE
from tests.support.tiny_models import SHAPE, TOKEN, family_teacher

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftkv_platform.model.weights.bases.GGUF_CACHE", tmp_path / "cache")


def teacher(family: str) -> PreTrainedModel:
    """Return a teacher whose weights are exact in bfloat16."""
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    elif family == "gemma3_text":
        shape = SHAPE | TOKEN | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape))
    else:
        model = family_teacher(family)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=WIDE) for name in ("qwen2", "qwen3")), "gemma3_text"]
)
def test_the_directory_holds_the_model_its_tokenizer_and_its_template(family: str, tmp_path: Path) -> None:
    model = teacher(family)
    file = save_gguf(model, tmp_path / "tiny.gguf", chat_template=TEMPLATE)
    directory = convert_gguf(file)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    token_ids = torch.tensor([[256, *range(40)]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits, rtol=1e-4, atol=1e-4)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id == 257
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("añb", add_special_tokens=False)["input_ids"]) == "añb"
    converted = convert_checkpoint(directory, tmp_path / "student", num_key_value_layers=3, key_value_group_size=1)
    assert converted is not None


def test_a_file_is_converted_once_by_whoever_comes_first(tmp_path: Path) -> None:
    file = save_gguf(teacher("llama"), tmp_path / "tiny.gguf")
    with ThreadPoolExecutor(3) as threads:
        directories = set(threads.map(lambda _: convert_gguf(file), range(3)))
    [directory] = directories
    made = (directory / "config.json").stat().st_mtime_ns
    again = convert_gguf(file.rename(tmp_path / "other-name.gguf"))
    assert (again, (again / "config.json").stat().st_mtime_ns) == (directory, made)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [directory.name]


def test_a_file_whose_weights_are_missing_leaves_nothing(tmp_path: Path) -> None:
    file = save_gguf(teacher("llama"), tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ModelError, match="transformers cannot read it"):
        convert_gguf(file)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_workers_teacher_is_a_directory_if_it_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    file = save_gguf(teacher("llama"), tmp_path / "own" / "tiny.gguf")
    spec = ModelSpec(name_or_path=str(file))
    directory = Path(resolve_teacher(spec, tmp_path, access=Access(roots=(str(tmp_path / "own"),))))
    assert directory.parent == tmp_path / "cache"
    assert (directory / "model.safetensors").is_file()
    with pytest.raises(InvalidInputError, match="may not read"):
        resolve_teacher(spec, tmp_path, access=Access(roots=(str(tmp_path / "elsewhere"),)))


def test_a_conversion_holds_what_its_digest_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(teacher("llama"), tmp_path / "tiny.gguf", chat_template=TEMPLATE)
    sound, evil = file.read_bytes(), file.read_bytes().replace(b"{{ m.content }}", b"{{'evil'}}     ")
    hash_file = hashlib.file_digest

    def hash_and_lose_the_race(stream: BinaryIO, algorithm: str) -> Any:
        found = hash_file(stream, algorithm)
        file.write_bytes(evil)
        return found

    with monkeypatch.context() as racing:
        racing.setattr(hashlib, "file_digest", hash_and_lose_the_race)
        with pytest.raises(ModelError, match="changes while it is read"):
            convert_gguf(file)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    file.write_bytes(sound)
    (tmp_path / "chat_template.jinja").write_text("evil")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "evil", "eos_token": "evil"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    directory = convert_gguf(file)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == (TEMPLATE, 257)
    assert "evil" not in "".join(path.read_text(errors="replace") for path in directory.glob("*.j*"))
    assert directory.stat().st_mode & 0o077 == directory.parent.stat().st_mode & 0o077 == 0


def test_a_file_that_became_a_link_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    secret = save_gguf(teacher("llama"), tmp_path / "secret.gguf")
    file = save_gguf(teacher("llama"), tmp_path / "own" / "tiny.gguf")
    boundary, check = Boundary.from_directories(tmp_path / "own"), Boundary.check_path

    def check_and_lose_the_race(self: Boundary, path: Path, *arguments: Any, **options: Any) -> Path:
        found = check(self, path, *arguments, **options)
        if path == file and not file.is_symlink():
            file.unlink()
            file.symlink_to(secret)
        return found

    monkeypatch.setattr(Boundary, "check_path", check_and_lose_the_race)
    with pytest.raises(ModelError, match="may not read"), boundary.open_file(file, "model", error=ModelError):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_cache_is_not_used(tmp_path: Path) -> None:
    file, cache = save_gguf(teacher("llama"), tmp_path / "tiny.gguf"), tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, 12345, 12345)
    with pytest.raises(ModelError, match="belongs to user 12345"):
        convert_gguf(file)
    (tmp_path / "own").mkdir()
    cache.rmdir()
    cache.symlink_to(tmp_path / "own")
    os.chown(cache, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ModelError, match="belongs to user 12345"):
        convert_gguf(file)
    assert list((tmp_path / "own").iterdir()) == []
