"""Directories, cards, links and models that try to run code, to read what lies outside of a tenant's root, or to reach
a socket. Every payload is laid out below `Stage.root`, which the tenant may read; files it must not touch are outside.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

CANARY = "CANARY-of-another-tenant"
"""Text that must never reach a job."""


@dataclass
class Listener:
    """A loopback socket that answers every request with a row of data, and records the requests."""

    port: int
    connections: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def listening() -> Iterator[Listener]:
    server = socket.create_server(("127.0.0.1", 0))
    listener = Listener(server.getsockname()[1])
    body = json.dumps({"text": CANARY}).encode() + b"\n"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body

    def serve() -> None:
        with suppress(OSError):  # closed at the end of the test
            while True:
                connection, _ = server.accept()
                with connection:
                    listener.connections.append(connection.recv(4096).decode(errors="replace"))
                    connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@dataclass(frozen=True)
class Stage:
    """Directories in which payloads are laid out."""

    root: Path
    """Open to the tenant."""
    outside: Path
    """Another tenant's directory, whose files hold the canary."""
    marker: Path
    """Exists once a payload's code has run."""
    url: str
    """URL of the listening socket."""
    teacher: Path
    """A sound model, of which hostile ones are modified copies."""

    @classmethod
    def build(cls, directory: Path, url: str, teacher: Path) -> Stage:
        stage = cls(directory / "acme", directory / "other", directory / "code-has-run", url, teacher)
        stage.root.mkdir()
        (stage.outside / "rows").mkdir(parents=True)
        for name in ("canary.jsonl", "rows/canary.jsonl"):
            write_rows(stage.outside / name, CANARY)
        (stage.outside / "canary.jinja").write_text(CANARY)
        return stage

    def directory(self, name: str) -> Path:
        path = self.root / name
        path.mkdir()
        return path


def write_rows(path: Path, text: str, count: int = 8) -> None:
    path.write_text("".join(json.dumps({"text": f"{text} {number}"}) + "\n" for number in range(count)))


def _card(directory: Path, data_files: str, *, info: dict[str, Any] | None = None, **config: Any) -> Path:
    """Lay a directory out as on the hub, with a card that names its data files; `own.jsonl` is an innocent file."""
    write_rows(directory / "own.jsonl", "own")
    card = {"configs": [{"config_name": "default", "data_files": data_files, **config}], "dataset_info": info}
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in card.items() if value is not None)
    (directory / "README.md").write_text(f"---\n{text}---\n")
    return directory


class Exploit:
    """An object whose pickle writes the marker when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


def ssti(marker: Path) -> str:
    """A Jinja expression that runs a command where templates are not sandboxed."""
    return f"{{{{ cycler.__init__.__globals__.os.popen('touch {marker}').read() }}}}"


# Data sources -----------------------------------------------------------------------------------------------------

CARDS: dict[str, Callable[[Stage], dict[str, str]]] = {
    "absolute": lambda stage: {"data_files": str(stage.outside / "canary.jsonl")},
    "parent": lambda stage: {"data_files": "../../other/canary.jsonl"},
    "url": lambda stage: {"data_files": f"{stage.url}/rows.jsonl"},
    "chained": lambda stage: {"data_files": f"zip://*.jsonl::{stage.url}/rows.zip"},
    "data-dir": lambda stage: {"data_files": "*.jsonl", "data_dir": str(stage.outside)},
}
"""Data files that a hostile card names, by the name of its directory."""


def hostile_card(name: str, stage: Stage) -> Path:
    return _card(stage.directory(name), **CARDS[name](stage))


def card_beside_the_card(stage: Stage) -> Path:
    """A `.huggingface.yaml`, which replaces the configurations of the card."""
    directory = _card(stage.directory("standalone"), "own.jsonl")
    configs = [{"config_name": "default", "data_files": str(stage.outside / "canary.jsonl")}]
    (directory / ".huggingface.yaml").write_text(json.dumps({"configs": configs}))
    return directory


def card_with_pictures(stage: Stage) -> Path:
    """Rows with a column declared as an image: `datasets` opens the path in it, or fetches the URL."""
    features = [{"name": "text", "dtype": "string"}, {"name": "image", "dtype": "image"}]
    directory = _card(stage.directory("pictures"), "own.jsonl", info={"features": features})
    rows = [{"text": "own", "image": {"bytes": None, "path": f"{stage.url}/picture.png"}}] * 4
    (directory / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def card_with_a_pickle(stage: Stage) -> Path:
    directory = _card(stage.directory("pickle"), "rows.pkl")
    (directory / "rows.pkl").write_bytes(pickle.dumps(Exploit(stage.marker)))
    return directory


def builder_script(stage: Stage) -> Path:
    directory = _card(stage.directory("script"), "own.jsonl")
    (directory / "script.py").write_text(f"open({str(stage.marker)!r}, 'w').close()\n")
    return directory


def linked_card_files(stage: Stage) -> Path:
    directory = _card(stage.directory("linked-card-files"), "*.jsonl")
    (directory / "more.jsonl").symlink_to(stage.outside / "canary.jsonl")
    return directory


def linked_directory(stage: Stage) -> Path:
    directory = stage.directory("linked-directory")
    write_rows(directory / "own.jsonl", "own")
    (directory / "more").symlink_to(stage.outside / "rows")
    return directory


def saved_with_a_parent(stage: Stage) -> Path:
    """A `save_to_disk` directory whose state names another tenant's file."""
    directory = _saved(stage, "saved", stage.root / "saved")
    state = json.loads((directory / "state.json").read_text())
    state["_data_files"] = [{"filename": f"../../other/saved/{state['_data_files'][0]['filename']}"}]
    (directory / "state.json").write_text(json.dumps(state))
    return directory


def saved_splits_with_a_parent(stage: Stage) -> Path:
    directory = stage.directory("splits")
    _saved(stage, "split", directory / "train")
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "../../other/split"]}))
    return directory


def _saved(stage: Stage, theirs: str, own: Path) -> Path:
    """Save another tenant's rows to `theirs`, and the tenant's own rows to `own`; return `own`."""
    import datasets

    datasets.Dataset.from_dict({"text": [CANARY] * 8}).save_to_disk(stage.outside / theirs)
    datasets.Dataset.from_dict({"text": ["own"] * 8}).save_to_disk(own)
    return own


DATA: dict[str, Callable[[Stage], Path]] = {
    **{name: partial(hostile_card, name) for name in CARDS},
    "card-beside-the-card": card_beside_the_card,
    "pictures": card_with_pictures,
    "pickle": card_with_a_pickle,
    "script": builder_script,
    "linked-card-files": linked_card_files,
    "linked-directory": linked_directory,
    "saved": saved_with_a_parent,
    "splits": saved_splits_with_a_parent,
}
"""Functions that lay out what a tenant can give as a data source."""


def lay_out_hub_data(stage: Stage, cache: Path, name: str = "evil/rows") -> str:
    """Lay out a hub data set as in the cache, with a card that names a URL; return its id."""
    snapshot = _snapshot(cache, "datasets", name)
    _card(snapshot, f"{stage.url}/rows.jsonl")
    return name


# Models -----------------------------------------------------------------------------------------------------------


def _copied(stage: Stage, name: str) -> Path:
    return Path(shutil.copytree(stage.teacher, stage.root / name))


def edit_json(path: Path, **values: Any) -> None:
    """Set fields of a JSON file, which need not exist."""
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, **values}))


def model_with_linked_weights(stage: Stage) -> Path:
    directory = _copied(stage, "linked-weights")
    shutil.copy(stage.teacher / "model.safetensors", stage.outside / "canary.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(stage.outside / "canary.safetensors")
    return directory


def model_with_a_shard_outside(stage: Stage) -> Path:
    from safetensors.torch import load_file

    directory = _copied(stage, "shard-outside")
    shutil.move(directory / "model.safetensors", stage.outside / "shard.safetensors")
    names = load_file(stage.outside / "shard.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../../other/shard.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def model_with_a_linked_template(stage: Stage) -> Path:
    directory = _copied(stage, "linked-template")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "chat_template.jinja").symlink_to(stage.outside / "canary.jinja")
    return directory


def model_with_a_tokenizer_outside(stage: Stage) -> Path:
    """A model whose only tokenizer is outside, as its `tokenizer_file`."""
    directory = _copied(stage, "tokenizer-outside")
    shutil.move(directory / "tokenizer.json", stage.outside / "tokenizer.json")
    edit_json(directory / "tokenizer_config.json", tokenizer_file=str(stage.outside / "tokenizer.json"))
    return directory


def model_with_pickled_weights(stage: Stage) -> Path:
    directory = _copied(stage, "pickled")
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(stage.marker)))
    return directory


def model_with_custom_code(stage: Stage) -> Path:
    directory = _copied(stage, "custom-code")
    code = f"open({str(stage.marker)!r}, 'w').close()\n"
    (directory / "modeling.py").write_text(code)
    names = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    edit_json(directory / "config.json", model_type="evil", auto_map=names)
    edit_json(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling.Tokenizer", None]})
    return directory


def model_with_an_adapter(stage: Stage) -> Path:
    """A model with an adapter file; `from_pretrained` would read the base model that it names."""
    directory = _copied(stage, "adapter")
    edit_json(directory / "adapter_config.json", base_model_name_or_path=str(stage.outside), peft_type="LORA")
    return directory


def adapter_of_a_model_outside(stage: Stage) -> Path:
    """An adapter whose base model the tenant may not read."""
    from tests.support.fakes.peft import save_adapter
    from tests.support.tiny_models import random_teacher

    shutil.copytree(stage.teacher, stage.outside / "base")
    save_adapter(random_teacher(), stage.root / "lora", stage.outside / "base")
    return stage.root / "lora"


def model_with_a_kernel(stage: Stage) -> Path:
    """A model whose attention implementation is a repository of code."""
    directory = _copied(stage, "kernel")
    edit_json(directory / "config.json", attn_implementation="evil/kernel")
    return directory


MODELS = (
    model_with_linked_weights,
    model_with_a_shard_outside,
    model_with_a_linked_template,
    model_with_a_tokenizer_outside,
    model_with_pickled_weights,
    model_with_custom_code,
    model_with_an_adapter,
    adapter_of_a_model_outside,
    model_with_a_kernel,
)
"""Functions that lay out what a tenant can give as a teacher."""


def lay_out_hub_model(stage: Stage, cache: Path, name: str = "evil/teacher") -> str:
    """Lay out a hub model as in the cache, with a chat template that is a link out of the cache; return its id."""
    snapshot = _snapshot(cache, "models", name)
    for path in stage.teacher.iterdir():
        if path.name != "chat_template.jinja":
            shutil.copy(path, snapshot / path.name)
    (snapshot / "chat_template.jinja").symlink_to(stage.outside / "canary.jinja")
    return name


def _snapshot(cache: Path, kind: str, name: str) -> Path:
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    commit = "0" * 40
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return snapshot


# Tasks ------------------------------------------------------------------------------------------------------------


def write_task(path: Path, stage: Stage) -> Path:
    """Write a task's file, of any name, whose template runs a command, as does the function that it names."""
    data = stage.root / "task-rows.jsonl"
    data.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    (path.parent / "evil_task.py").write_text(f"open({str(stage.marker)!r}, 'w').close()\ndef run(docs): return docs\n")
    path.write_text(
        "task: evil\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(data))}}}}}\n"
        "test_split: test\n"
        "output_type: generate_until\n"
        f"doc_to_text: {json.dumps('Q: ' + ssti(stage.marker))}\n"
        "doc_to_target: '{{answer}}'\n"
        "process_docs: !function evil_task.run\n"
        "generation_kwargs: {max_gen_toks: 4, until: [x]}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    return path
