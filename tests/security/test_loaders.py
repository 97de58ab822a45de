"""Third-party loaders open no file but those of the model's directory, whatever its small files say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer

from swiftkv_platform.engine import EngineConfig, LLMEngine
from swiftkv_platform.engine.loading import describe_model
from swiftkv_platform.errors import ModelError
from swiftkv_platform.jobs.worker.measure import _load_student as load_for_evaluation
from swiftkv_platform.model import convert_checkpoint, load_dense
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.model.weights.bases import convert_gguf
from swiftkv_platform.sources import Boundary
from swiftkv_platform.sources.model_directories import TOKENIZER_VIEW, check_model_files, create_model_view
from swiftkv_platform.sources.teacher_config import read_teacher_config
from tests.security.hostile_sources import CANARY
from tests.security.hostile_sources import edit_json as change
from tests.support.checkpoints import SHAPE, save
from tests.support.fakes.gguf import save_gguf
from tests.support.tiny_models import random_teacher

Write = Callable[[Path, Path], object]
"""Function that changes the model in a directory so that it names the other path."""


class _Opened:
    """Paths that this process opens while it watches."""

    paths: list[str] | None = None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.paths is not None and event == "open" and isinstance(arguments[0], str | os.PathLike):
            self.paths.append(os.path.realpath(arguments[0]))


_opened = _Opened()
sys.addaudithook(_opened)


@contextmanager
def record_opened_files() -> Iterator[list[str]]:
    _opened.paths = paths = []
    try:
        yield paths
    finally:
        _opened.paths = None


def vocabulary(name: str, **more: Any) -> Write:
    """A directory without a tokenizer's files, whose class is given a path."""

    def write(directory: Path, other: Path) -> None:
        (directory / "tokenizer.json").unlink()
        values = {name: [str(other)] if name == "init_inputs" else str(other), **more}
        (directory / "tokenizer_config.json").write_text(json.dumps(values))

    return write


def special_tokens(directory: Path, other: Path) -> None:
    """The same, in a file that older versions wrote, which transformers merges with the other one."""
    vocabulary("tokenizer_class", tokenizer_class="BertTokenizer")(directory, other)
    (directory / "special_tokens_map.json").write_text(json.dumps({"vocab": str(other)}))


def versioned(directory: Path, other: Path) -> None:
    path = os.path.relpath(other, directory)
    change(directory / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.1.0.0.json", path])


def descriptor(directory: Path, other: Path) -> None:
    """A number in place of a path is an open file."""
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "vocab": 0, "merges": 0}')


def config(**values: Any) -> Write:
    def write(directory: Path, other: Path) -> None:
        change(directory / "config.json", **json.loads(json.dumps(values).replace("OTHER", str(other))))

    return write


def shard(name: str) -> Write:
    def write(directory: Path, other: Path) -> None:
        (directory / "model.safetensors").unlink(missing_ok=True)
        path = os.path.relpath(other, directory)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: path}}))

    return write


REFUSED: dict[str, Write] = {
    "vocab of Bert": vocabulary("vocab", tokenizer_class="BertTokenizer"),
    "vocab of another class": vocabulary("vocab", tokenizer_class="GPT2Tokenizer", merges="/dev/null"),
    "merges": vocabulary("merges", tokenizer_class="Qwen2Tokenizer"),
    "arguments without names": vocabulary("init_inputs", tokenizer_class="BertTokenizer"),
    "a class of other files": vocabulary("vocab_file", tokenizer_class="CTRLTokenizer"),
    "special tokens": special_tokens,
    "files by version": versioned,
    "an open file": descriptor,
    "a shard": shard("lm_head.weight"),
    "weights": config(transformers_weights="OTHER"),
    "files of configurations": config(configuration_files=["OTHER"]),
    "a draft": config(speculators_config={"verifier": {"name_or_path": "OTHER"}}),
    "a kernel": config(_attn_implementation="evil/kernel"),
}
DROPPED: dict[str, Write] = {
    "a tokenizer's file": lambda directory, other: change(
        directory / "tokenizer_config.json", tokenizer_file=os.path.relpath(other, directory), vocab_file=str(other)
    ),
    "code": lambda directory, other: change(
        directory / "tokenizer_config.json", auto_map={"AutoTokenizer": [f"{other}--a.B", None]}
    ),
    "names": config(
        _name_or_path="OTHER",
        auto_map={"AutoConfig": "OTHER--a.B"},
        custom_pipelines={"a": {"impl": "OTHER"}},
        adapter="OTHER",
        tokenizer_class="OTHER",
    ),
    "generation": lambda directory, other: change(
        directory / "generation_config.json", custom_generate=str(other), assistant_model=str(other)
    ),
}
LOADERS: dict[str, Callable[[Path], Any]] = {
    "import": lambda path: check_model_files(path, Boundary.from_directories(path), "source"),
    "native engine": lambda path: LLMEngine.from_pretrained(path, EngineConfig(dtype="float32")),
    "vLLM": lambda path: (describe_model(path, EngineConfig()), create_model_view(path, path.parent / "views")),
    "evaluation": load_for_evaluation,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    save(random_teacher(), directory / "teacher")
    convert_checkpoint(directory / "teacher", directory / "student", **SHAPE)
    return directory / "student"


@pytest.fixture
def student(tmp_path: Path, sound: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "student"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other" / "tokenizer.9.0.0.json"
    path.parent.mkdir()
    path.write_text(f"{CANARY}\n")
    return path


@pytest.mark.parametrize("way", LOADERS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_names_another_file_is_refused_unread(student: Path, other: Path, name: str, way: str) -> None:
    REFUSED[name](student, other)
    with record_opened_files() as paths, pytest.raises(ModelError) as caught:
        LOADERS[way](student)
    assert str(other) not in paths
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("way", LOADERS)
@pytest.mark.parametrize("name", DROPPED)
def test_names_that_change_nothing_are_not_followed(student: Path, other: Path, name: str, way: str) -> None:
    DROPPED[name](student, other)
    with record_opened_files() as paths:
        LOADERS[way](student)
    assert str(other) not in paths


def test_neither_a_teacher_nor_a_gguf_file_is_read_with_its_neighbours(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(random_teacher(), tmp_path / "teacher")
    change(directory / "tokenizer_config.json", init_inputs=[str(other)])
    with pytest.raises(ModelError, match=r"tokenizer_config\.json has init_inputs"):
        convert_checkpoint(directory, tmp_path / "made", **SHAPE)
    file = tmp_path / "gguf" / "model.gguf"
    file.parent.mkdir()
    save_gguf(random_teacher(), file)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (file.parent / name).write_text(json.dumps({"fast_tokenizer_files": [str(other)], "init_inputs": [str(other)]}))
    monkeypatch.setattr("swiftkv_platform.model.weights.bases.GGUF_CACHE", tmp_path / "cache")
    made = convert_gguf(file)
    assert load_tokenizer(made, 1 << 20).get_vocab()


def test_an_error_of_a_loader_quotes_no_file(student: Path) -> None:
    (student / "tokenizer.json").write_text(json.dumps({"version": CANARY, "model": {"type": CANARY}}))
    with pytest.raises(ModelError, match="its tokenizer cannot be read") as caught:
        load_tokenizer(student, 258)
    assert CANARY not in str(caught.value)


def test_vllm_is_given_listed_files_only(student: Path, tmp_path: Path) -> None:
    change(student / "config.json", _name_or_path="/a", auto_map={"AutoConfig": "a.B"}, author="b")
    listed = {path.name for path in student.iterdir()} - {"README.md"} | {"additional_chat_templates/tool.jinja"}
    strange = ("params.json", "modules.json", "sentence_bert_config.json", "modeling.py")
    for name in (*strange, "consolidated.safetensors", "preprocessor_config.json", "notes.txt"):
        (student / name).write_text("{}")
    (student / "additional_chat_templates").mkdir()
    (student / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    os.mkfifo(student / "pipe.safetensors")
    own = ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool.jinja")
    listed |= {f"{TOKENIZER_VIEW}/{name}" for name in own}
    view = create_model_view(student, tmp_path / "views")
    assert {str(path.relative_to(view)) for path in view.rglob("*") if path.is_file()} == listed
    assert not json.loads((view / "config.json").read_text()).keys() & {"_name_or_path", "auto_map", "author"}
    assert read_config(view).to_diff_dict() == read_config(student).to_diff_dict()
    assert create_model_view(student, tmp_path / "views") == view, "caches that depend on its path are found again"
    shutil.copytree(student, tmp_path / "moved", ignore=shutil.ignore_patterns("pipe*"))
    shutil.rmtree(student)
    create_model_view(tmp_path / "moved", tmp_path / "views")
    assert not view.exists(), "its weights have gone"


def test_a_tokenizer_of_plain_files_is_read_from_them_alone(tmp_path: Path, student: Path) -> None:
    (student / "tokenizer.json").unlink()
    characters = [*"abcdefgh ", "ab", "cd"]
    (student / "vocab.json").write_text(json.dumps({each: number for number, each in enumerate(characters)}))
    (student / "merges.txt").write_text("#version: 0.2\na b\nc d\n")
    (student / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": true}')
    expected = AutoTokenizer.from_pretrained(student)
    assert isinstance(expected, GPT2Tokenizer)
    tokenizer = load_tokenizer(student, 258)
    assert (tokenizer.get_vocab(), tokenizer("abcd abe")) == (expected.get_vocab(), expected("abcd abe"))
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved", 258).get_vocab() == expected.get_vocab()
    assert str(tmp_path) not in (tmp_path / "saved" / "tokenizer_config.json").read_text()


def test_a_dense_model_is_read_by_the_same_rules(student: Path, other: Path) -> None:
    REFUSED["weights"](student, other)
    with pytest.raises(ModelError, match="transformers_weights"):
        load_dense(student)


def test_the_control_plane_refuses_an_adapter_beside_weights(student: Path) -> None:
    (student / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelError, match=r"has a PEFT adapter \(adapter_config.json\) and other weights"):
        read_teacher_config(str(student), lambda *_: b"")


@pytest.mark.parametrize("name", ["weights", "files of configurations", "a draft", "a kernel"])
def test_the_control_plane_refuses_a_teacher_that_loaders_refuse(student: Path, other: Path, name: str) -> None:
    REFUSED[name](student, other)
    with pytest.raises(ModelError, match=r"its config\.json"):
        read_teacher_config(str(student), lambda *_: b"")
