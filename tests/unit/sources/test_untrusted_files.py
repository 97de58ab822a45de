"""Files in a directory that a caller names are hostile: none may take the memory or time of other callers."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.control_plane.jobs.estimates import validate_and_estimate
from swiftkv_platform.data.checks import check_sources
from swiftkv_platform.errors import ObjectNotFoundError, SwiftKVError
from swiftkv_platform.sources import Boundary, SourceRules
from swiftkv_platform.sources.cards import check_card, check_saved_dataset, read_license
from swiftkv_platform.sources.gguf import read_gguf_config
from swiftkv_platform.sources.layout import is_hub_layout
from swiftkv_platform.sources.model_directories import check_model_files
from swiftkv_platform.sources.teacher_config import read_teacher_config
from swiftkv_platform.sources.untrusted_files import CONFIG_BYTES, UnusableFileError, parse_object, read_small_file
from swiftkv_platform.specs import DataSourceSpec, JobSpec
from tests.support.model_configs import llama_config

pytestmark = pytest.mark.slow("reads models")

SPARSE = 3 << 29
"""Size of a sparse file, which takes no disk space."""
MOST_MEMORY = 64 << 20


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(SPARSE)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def brackets(path: Path) -> None:
    path.write_bytes(b"[" + b"[]," * (20 << 20) + b"[]]")


def aliases(path: Path) -> None:
    levels = [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 30)]
    mark = ["---"] if path.suffix == ".md" else []
    path.write_text("\n".join([*mark, "a0: &a0 [x]", *levels, "configs: *a29", *mark]))


def teacher(directory: Path) -> Any:
    return read_teacher_config(str(directory), lambda *_: b"")


def model_files(directory: Path) -> None:
    check_model_files(directory, Boundary.from_directories(directory), "model")


def card(directory: Path) -> None:
    check_card(next(path for path in directory.iterdir()), "data")


def saved(directory: Path) -> None:
    check_saved_dataset(directory, "data")


def gguf(directory: Path) -> Any:
    return read_gguf_config(directory / "model.gguf", field="model")


def rows(directory: Path) -> Any:
    return check_sources(
        [DataSourceSpec(name_or_path=str(directory))], SourceRules((str(directory),)).build_access("acme")
    )


READERS: list[tuple[str, Callable[[Path], Any]]] = [
    ("config.json", teacher),
    ("config.json", model_files),
    ("tokenizer_config.json", model_files),
    ("config.json", read_license),
    ("README.md", read_license),
    ("README.md", card),
    (".huggingface.yaml", card),
    ("README.md", is_hub_layout),
    ("state.json", saved),
    ("dataset_dict.json", saved),
    ("rows.jsonl", rows),
    ("README.md", rows),
    ("rows.parquet", rows),
    ("model.gguf", gguf),
]


def check_bounds(act: Callable[[], object]) -> None:
    """Check that `act` takes little memory and, if it is refused, that the message is short."""
    refusal = ""
    tracemalloc.start()
    try:
        act()
    except SwiftKVError as error:
        refusal = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (peak < MOST_MEMORY, len(refusal) < 1000) == (True, True)


@pytest.mark.parametrize("hostile", [sparse, pipe, deep, brackets, aliases])
@pytest.mark.parametrize(("name", "read"), READERS, ids=[f"{read.__name__} {name}" for name, read in READERS])
def test_a_hostile_file_is_refused_or_passed_over_within_bounds(
    tmp_path: Path, hostile: Callable[[Path], None], name: str, read: Callable[[Path], Any]
) -> None:
    hostile(tmp_path / name)
    check_bounds(lambda: read(tmp_path))


def test_a_longer_object_of_a_store_is_refused() -> None:
    def longer(_store: str, _key: str) -> bytes:
        raise UnusableFileError(f"is longer than {CONFIG_BYTES} bytes")

    def lacks_adapter(store: str, key: str) -> bytes:
        if key.endswith("adapter_config.json"):
            raise ObjectNotFoundError(key)
        return longer(store, key)

    for read, file in ((longer, "adapter_config"), (lacks_adapter, "config")):
        with pytest.raises(SwiftKVError, match=rf"its {file}\.json is longer than 1048576 bytes"):
            read_teacher_config("s3://bucket/model", read)


@pytest.mark.parametrize("length", [1 << 63, 1 << 32, 3 << 20])
@pytest.mark.parametrize("kind", [8, 0])
def test_a_list_of_a_gguf_file_that_announces_too_much_is_refused_at_once(
    tmp_path: Path, length: int, kind: int
) -> None:
    """The strings are empty, so that a small header could announce millions of them."""
    key = struct.pack("<Q", 1) + b"a"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, kind, length)
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with path.open("r+b") as stream:
        stream.truncate(len(start) + (1 << 20))
    with pytest.raises(SwiftKVError, match=r"strings; at most 2097152 are read in total|is truncated"):
        read_gguf_config(path, field="model")


def test_content_up_to_the_bound_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": 1}')
    assert parse_object(read_small_file(path, 8)) == {"a": 1}
    with pytest.raises(UnusableFileError, match="is longer than 7 bytes"):
        read_small_file(path, 7)
    for data, why in (
        (b"\xff", "not JSON"),
        (b"9" * 5000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 99_999, "deeply"),
    ):
        with pytest.raises(UnusableFileError, match=why):
            parse_object(data)


STRANGE: list[Any] = [0, -1, True, 1.5, 1e308, 10**9, 10**12, 1 << 62, 10**4000, "x", [], [1] * 9, {"a": {}}, [[]]]


@pytest.mark.parametrize(
    "field",
    [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
        *("vocab_size", "max_position_embeddings", "head_dim", "rope_scaling", "torch_dtype", "quantization_config"),
        *("tie_word_embeddings", "layer_types", "sliding_window"),
    ],
)
def test_no_value_of_a_configuration_takes_the_control_plane_down(tmp_path: Path, field: str) -> None:
    spec = JobSpec.model_validate({"name": "t", "model": {"name_or_path": str(tmp_path)}})
    for value in STRANGE:
        (tmp_path / "config.json").write_text(json.dumps({**llama_config(4), field: value}))
        check_bounds(lambda: validate_and_estimate(spec, lambda *_: b"").model_dump_json())
