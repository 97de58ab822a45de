"""Models of the hub: only the files that their reader needs are fetched, and weights once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from swiftkv_platform.cli.sources import read_model_config
from swiftkv_platform.engine import LLMEngine
from swiftkv_platform.errors import ModelError
from swiftkv_platform.jobs.worker.prepare import _load_engine
from swiftkv_platform.model import convert, convert_checkpoint, export_adapter
from swiftkv_platform.model.weights.adapters import open_merged_model
from swiftkv_platform.model.weights.bases import resolve_model_directory
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.sources.model_directories import fetch_model_directory, fetch_tokenizer_directory
from tests.support.distill_jobs import job_spec
from tests.support.fakes.hub_server import Hub, go_online, run_hub
from tests.support.fakes.peft import save_adapter

MODEL = "acme/model"
NOT_NEEDED = {"pytorch_model.bin", "pytorch_model.bin.index.json", "training_args.bin", "consolidated.safetensors"}
NOT_NEEDED |= {"original/consolidated.00.pth", "original/params.json", "onnx/model.onnx", "fp16/model.safetensors"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with run_hub() as hub:
        hub.use(monkeypatch, tmp_path / "hub")
        yield hub


def upload(hub: Hub, directory: Path, *, without: str = "") -> None:
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != without}
    hub.repositories[MODEL] = {name: name.encode() for name in NOT_NEEDED} | files


def serve(name: str, _: Path) -> None:
    LLMEngine.from_pretrained(name)


def write(name: str, _: Path) -> None:
    _load_engine(job_spec(name, "corpus.txt", max_steps=1), name)


def make_student(name: str, target: Path) -> None:
    convert_checkpoint(name, target, num_key_value_layers=3)


def check(name: str, _: Path) -> None:
    resolve_model_directory(name, access=Access(roots=()))


@pytest.mark.parametrize("fetch", [serve, write, make_student, check])
def test_weights_come_once_and_without_pickles(
    fetch: Callable[[str, Path], None], hub: Hub, tiny_teacher: Path, tmp_path: Path
) -> None:
    upload(hub, tiny_teacher)
    fetch(MODEL, tmp_path / "student")
    assert hub.fetched >= {path.name for path in tiny_teacher.iterdir()}
    assert hub.fetched & NOT_NEEDED == set()


def test_an_adapter_comes_without_pickles(hub: Hub, tiny_teacher: Path, tmp_path: Path) -> None:
    convert(tiny_teacher, num_key_value_layers=3).save_pretrained(tmp_path / "student")
    export_adapter(tmp_path / "student", tmp_path / "adapter", base=tiny_teacher)
    upload(hub, tmp_path / "adapter")
    with open_merged_model(MODEL, base_model=tiny_teacher) as (directory, adapter):
        assert adapter is not None
        assert (Path(directory) / "config.json").is_file()
    assert hub.fetched & NOT_NEEDED == set()


@pytest.mark.parametrize("access", [UNRESTRICTED, Access(roots=())])
def test_a_peft_adapter_and_its_base_come_from_the_hub(
    access: Access, hub: Hub, tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.model.weights.bases.PEFT_CACHE", tmp_path / "cache")
    upload(hub, tiny_teacher)
    save_adapter(AutoModelForCausalLM.from_pretrained(tiny_teacher), tmp_path / "adapter", MODEL, revision="main")
    hub.repositories["acme/lora"] = {
        path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()
    } | dict.fromkeys(("training_args.bin", "adapter_model.bin"), b"")
    assert read_model_config("acme/lora") == json.loads((tiny_teacher / "config.json").read_text())
    merged = resolve_model_directory("acme/lora", access=access)
    assert hub.fetched & {*NOT_NEEDED, "adapter_model.bin"} == set()
    go_online(monkeypatch, False)
    assert resolve_model_directory("acme/lora", access=access) == merged
    assert convert(merged, num_key_value_layers=3).config.num_hidden_layers == 6


@pytest.mark.parametrize("fetch", [serve, write, make_student, check])
def test_pickles_alone_are_refused_unfetched(
    fetch: Callable[[str, Path], None], hub: Hub, tiny_teacher: Path, tmp_path: Path
) -> None:
    upload(hub, tiny_teacher, without="model.safetensors")
    with pytest.raises(ModelError, match="save the model as safetensors"):
        fetch(MODEL, tmp_path / "student")
    assert hub.fetched & NOT_NEEDED == set()


def test_pickles_come_where_their_reader_has_nothing_else(hub: Hub, tiny_teacher: Path) -> None:
    upload(hub, tiny_teacher, without="model.safetensors")
    directory = fetch_model_directory(MODEL, field="model", pickles=True)
    assert (directory / "pytorch_model.bin").is_file()
    assert hub.fetched & NOT_NEEDED == {"pytorch_model.bin", "pytorch_model.bin.index.json"}


UNREAD = {"LICENSE", "NOTICE.txt", "README.md", "training_args.json", "trainer_state.json", "vocab.json", "merges.txt"}
UNREAD |= {"tokenizer.model", "manifest.json", "requirements.txt"}


@pytest.mark.parametrize("subfolder", ["", "student"])
@pytest.mark.parametrize(
    ("missing", "is_usable"),
    [
        *((name, True) for name in sorted(UNREAD)),
        *((name, False) for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")),
        ("chat_template.jinja", False),
    ],
)
def test_offline_a_cache_needs_only_what_is_read(
    missing: str, is_usable: bool, subfolder: str, hub: Hub, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {*UNREAD, "generation_config.json", "chat_template.jinja"}
    files = dict.fromkeys(names, b"{}") | {path.name: path.read_bytes() for path in tiny_teacher.iterdir()}
    hub.repositories[MODEL] = {str(Path(subfolder, name)): data for name, data in files.items()}
    directory = fetch_model_directory(MODEL, field="model", subfolder=subfolder)
    (directory / missing).unlink(missing_ok=True)
    go_online(monkeypatch, False)
    if is_usable:
        assert fetch_model_directory(MODEL, field="model", subfolder=subfolder) == directory
    else:
        with pytest.raises(ModelError, match=f"1 file\\(s\\) are missing .*{missing}"):
            fetch_model_directory(MODEL, field="model", subfolder=subfolder)


@pytest.mark.parametrize(
    ("missing", "is_usable"), [("merges.txt", True), ("vocab.json", True), ("tokenizer.json", False)]
)
def test_offline_a_tokenizer_file_replaces_the_vocabulary(
    missing: str, is_usable: bool, hub: Hub, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[MODEL] = dict.fromkeys(UNREAD, b"{}") | {
        path.name: path.read_bytes() for path in tiny_teacher.iterdir()
    }
    directory = fetch_tokenizer_directory(MODEL, field="model")
    (directory / missing).unlink()
    go_online(monkeypatch, False)
    if is_usable:
        assert fetch_tokenizer_directory(MODEL, field="model") == directory
    else:
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            fetch_tokenizer_directory(MODEL, field="model")
