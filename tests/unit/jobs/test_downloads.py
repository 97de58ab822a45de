"""Origins of a teacher, and uploaded files on a worker: fetched from the attempt's store, digests checked."""

import hashlib
import json
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import (
    AttemptRequest,
    StoredFile,
    file_key,
    is_file_id,
    new_file_id,
    parse_file_time,
)
from swiftkv_platform.data.evaluation_rows import read_evaluation_rows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.jobs.worker.setup import ObjectStoreFiles, get_access, resolve_teacher
from swiftkv_platform.sources import FileSource, HubSource, parse_source
from swiftkv_platform.sources.names import list_file_ids
from swiftkv_platform.specs import EvaluationSpec, JobSpec, ModelSpec, RowTaskSpec
from swiftkv_platform.storage.object_store import open_store
from tests.support.captured_traffic import DEPLOYMENT, SOURCE, Traffic
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.unit.jobs.attempts import request

ROWS = "".join(json.dumps({"text": f"row {i} of many"}) + "\n" for i in range(20)).encode()
FILE = new_file_id()


def test_a_built_in_teacher_lies_in_the_package(tmp_path: Path) -> None:
    path = Path(resolve_teacher(ModelSpec(), tmp_path))
    assert {"config.json", "model.safetensors"} <= {file.name for file in path.iterdir()}
    with pytest.raises(ModelError, match="builtin:python-5m") as raised:
        resolve_teacher(ModelSpec(name_or_path="builtin:gpt"), tmp_path)
    assert (raised.value.field, raised.value.value) == ("model.name_or_path", "builtin:gpt")


@pytest.mark.parametrize("name", ["/models/mine", "mine"])
def test_a_directory_that_is_missing_is_not_asked_of_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}': no such file or directory here"):
        resolve_teacher(ModelSpec(name_or_path=name), tmp_path)
    assert resolve_teacher(ModelSpec(name_or_path="models/mine"), tmp_path) == "models/mine", "an id of the hub stays"


def test_a_machine_that_is_not_to_fetch_knows_where_the_teacher_will_be(tmp_path: Path) -> None:
    teacher = Path(resolve_teacher(ModelSpec(name_or_path="s3://bucket/teacher"), tmp_path, fetch=False))
    assert teacher.parent == tmp_path
    assert not list(tmp_path.iterdir())


@pytest.fixture
def of_a_file(tmp_path: Path) -> AttemptRequest:
    """An attempt whose source is an uploaded file, of a tenant that may read no path."""
    store, key = open_store(str(tmp_path / "store")), file_key("acme", FILE)
    store.put_bytes(key, ROWS)
    stored = StoredFile(uri=f"{store.uri}/{key}", sha256=hashlib.sha256(ROWS).hexdigest(), size=len(ROWS))
    data = {"sources": [{"name_or_path": FILE}], "max_length": 64, "validation_fraction": 0.1}
    spec = JobSpec.model_validate({"name": "n", "data": data})
    made = request(spec=spec, allowed_roots=(), files={FILE: stored})
    return AttemptRequest.model_validate_json(made.model_dump_json())


def prepare(request: AttemptRequest, directory: Path) -> int:
    (directory / "rows").mkdir()
    sources = {"remote": ObjectStoreFiles(directory / "objects"), "access": get_access(request)}
    data = prepare_data(request.spec.data, byte_tokenizer(), directory / "rows", seed=0, **sources)
    return data.statistics.sources[0].rows


def test_rows_are_read_from_the_store_and_copied_below_the_workspace(of_a_file: AttemptRequest, tmp_path: Path) -> None:
    assert prepare(of_a_file, tmp_path) == 20
    [copy] = (path for path in (tmp_path / "objects").rglob("*") if path.is_file())
    assert copy.read_bytes() == ROWS


def test_an_uploaded_file_may_have_rows_to_evaluate(of_a_file: AttemptRequest, tmp_path: Path) -> None:
    task = RowTaskSpec.model_validate({"name": "own", "metric": "likelihood", "source": {"name_or_path": FILE}})
    spec = JobSpec(name="n", evaluation=EvaluationSpec(rows=(task,)))
    assert list_file_ids(spec) == [FILE]
    remote = ObjectStoreFiles(tmp_path / "objects")
    rows = list(read_evaluation_rows(task, 0, remote=remote, access=get_access(of_a_file)))
    assert [row.prompt for row in rows] == [json.loads(line)["text"] for line in ROWS.splitlines()]
    closed = get_access(of_a_file.model_copy(update={"files": {}}))
    with pytest.raises(InvalidInputError, match="no file with this id is uploaded") as refused:
        list(read_evaluation_rows(task, 0, remote=remote, access=closed))
    assert refused.value.field == "evaluation.rows[0].source.name_or_path"


def test_rows_that_have_changed_are_refused(of_a_file: AttemptRequest, tmp_path: Path) -> None:
    open_store(str(tmp_path / "store")).put_bytes(file_key("acme", FILE), ROWS + b"{}\n")
    with pytest.raises(DataError, match="differ from those uploaded") as refused:
        prepare(of_a_file, tmp_path)
    assert refused.value.field == "data.sources[0].name_or_path"


def test_an_attempt_reads_the_traffic_that_it_was_granted(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    traffic = Traffic(store)
    for number in range(20):
        traffic.chat(f"question {number}", "say")
    data = {"sources": [{"name_or_path": SOURCE, "until": "2024-10-05"}], "max_length": 64, "validation_fraction": 0.1}
    made = request(
        spec=JobSpec.model_validate({"name": "n", "data": data}),
        allowed_roots=(),
        traffic={DEPLOYMENT: f"{store.uri}/{traffic.prefix}"},
    )
    granted = AttemptRequest.model_validate_json(made.to_json())
    assert granted == made
    assert prepare(granted, tmp_path) == 20
    [copy] = (path for path in (tmp_path / "objects").rglob("*") if path.is_file())
    assert copy.read_bytes().count(b"\n") == 20
    (tmp_path / "closed").mkdir()
    with pytest.raises(InvalidInputError, match="only jobs of its control plane can read; submit the job with") as told:
        prepare(granted.model_copy(update={"traffic": {}}), tmp_path / "closed")
    assert (told.value.field, told.value.value) == ("data.sources[0].name_or_path", SOURCE)
    assert b"traffic" not in request().to_json(), "older workers refuse fields that they do not know"


def test_only_the_exact_form_of_an_id_is_a_file() -> None:
    assert parse_source(FILE, field="f") == FileSource(FILE)
    assert is_file_id(FILE)
    assert parse_file_time(FILE) > 1.7e9
    for name in ("file-reader", FILE.lower(), FILE[:-1], f"{FILE}x", f"org/{FILE}", f"{FILE}.jsonl"):
        assert not is_file_id(name)
        assert not isinstance(parse_source(name, field="f", relative_paths=False), FileSource)
    assert parse_source("file-reader", field="f", relative_paths=False) == HubSource("file-reader")
