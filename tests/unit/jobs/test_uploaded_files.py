"""Uploaded files on a worker: fetched from the store that the attempt names, and held to their digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import AttemptRequest, StoredFile, file_key, is_file_id, made_at, new_file_id
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.jobs.attempt.downloads import StoreFiles, access_of
from swiftkv_platform.sources import FileSource, HubSource, parse_source
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from tests.fakes.tokenizers import byte_tokenizer

ROWS = "".join(json.dumps({"text": f"row {i} of many"}) + "\n" for i in range(20)).encode()


@pytest.fixture
def file_id() -> str:
    return new_file_id()


@pytest.fixture
def request_of_a_file(tmp_path: Path, file_id: str) -> AttemptRequest:
    """An attempt of a tenant that may read no path at all."""
    store = open_store(str(tmp_path / "store"))
    store.put_bytes(file_key("acme", file_id), ROWS)
    stored = StoredFile(
        uri=f"{store.uri}/{file_key('acme', file_id)}", sha256=hashlib.sha256(ROWS).hexdigest(), size=len(ROWS)
    )
    spec = JobSpec.model_validate(
        {"name": "n", "data": {"sources": [{"name_or_path": file_id}], "max_length": 64, "validation_fraction": 0.1}}
    )
    request = AttemptRequest(
        job_id="job", attempt=1, spec=spec, run_id="run", allowed_roots=(), files={file_id: stored}
    )
    return AttemptRequest.model_validate_json(request.model_dump_json())


def prepare(request: AttemptRequest, directory: Path) -> int:
    rows = directory / "rows"
    rows.mkdir()
    remote = StoreFiles(directory / "objects")
    data = prepare_data(request.spec.data, byte_tokenizer(), rows, seed=0, remote=remote, access=access_of(request))
    return data.statistics.sources[0].rows


def test_rows_are_read_from_the_store_and_copied_below_the_workspace(
    request_of_a_file: AttemptRequest, tmp_path: Path
) -> None:
    assert prepare(request_of_a_file, tmp_path) == 20
    [copy] = (path for path in (tmp_path / "objects").rglob("*") if path.is_file())
    assert copy.read_bytes() == ROWS


def test_rows_that_have_changed_are_refused(request_of_a_file: AttemptRequest, file_id: str, tmp_path: Path) -> None:
    open_store(str(tmp_path / "store")).put_bytes(file_key("acme", file_id), ROWS + b"{}\n")
    with pytest.raises(DataError, match="not those that were uploaded") as refused:
        prepare(request_of_a_file, tmp_path)
    assert refused.value.field == "data.sources[0].name_or_path"


def test_a_file_that_the_control_plane_has_not_granted_is_closed(
    request_of_a_file: AttemptRequest, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="there is no such file"):
        prepare(request_of_a_file.model_copy(update={"files": {}}), tmp_path)


def test_only_the_exact_form_of_an_id_is_a_file() -> None:
    made = new_file_id()
    assert parse_source(made, field="f") == FileSource(made)
    assert is_file_id(made)
    assert made_at(made) > 1.7e9
    for name in ("file-reader", made.lower(), made[:-1], f"{made}x", f"org/{made}", f"{made}.jsonl"):
        assert not is_file_id(name)
        assert not isinstance(parse_source(name, field="f", relative_paths=False), FileSource)
    assert parse_source("file-reader", field="f", relative_paths=False) == HubSource("file-reader")
