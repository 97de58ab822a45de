"""Runs that wandb has recorded on disk (`run-*.wandb`), and their upload. Every attempt of a job records its own part,
and a resumed attempt repeats steps, which `wandb sync` would append under later step numbers.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from swiftkv_platform.client.errors import UnreachableError
from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.tracking.tracker import find_api_key, get_wandb_server

_FILE_HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK_BYTES = 32768
_FRAGMENT_HEADER = struct.Struct("<IHB")
"""Header of a fragment of a record: checksum, length and type, as in LevelDB's log format."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_RUN_DIRECTORY_NAME = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
_LAST_STEP_QUERY = """query LastStep($project: String!, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) { historyTail } } }"""


@dataclass(frozen=True)
class RecordedRun:
    """Directory of a recorded part of a run."""

    path: Path

    @property
    def run_id(self) -> str:
        return self._matched_run_name[2]

    @property
    def start_time(self) -> str:
        """Start time; parts of a run sort by it."""
        return self._matched_run_name[1]

    @property
    def record_file(self) -> Path:
        return self.path / f"run-{self.run_id}.wandb"

    @property
    def _matched_run_name(self) -> re.Match[str]:
        match = _RUN_DIRECTORY_NAME.fullmatch(self.path.name)
        if match is None:
            raise InvalidInputError(
                f"{self.path.name!r} is not the directory of a W&B run; use one named run-YYYYMMDD_HHMMSS-ID",
                field="path",
                value=str(self.path),
            )
        return match


def drop_steps(run: RecordedRun, up_to: int) -> int:
    """Remove the metrics of all steps up to `up_to` from a part of a run; return its last step, or `up_to` if no step
    is left. Reading stops at a truncated record of a killed process."""
    from wandb.proto import wandb_internal_pb2

    records: list[bytes] = []
    last = up_to
    for data in _read_records(run.record_file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            step = record.history.step.num
            if step <= up_to:
                continue
            last = max(last, step)
        records.append(data)
    run.record_file.write_bytes(_frame_records(records))
    return last


def fetch_last_step(project: str, entity: str | None, run_id: str) -> int:
    """Return the last step of a run at W&B; -1 without steps. Raises `InvalidInputError` for a missing or invalid API
    key, `UnreachableError` if W&B is unavailable or returns an error."""
    key, server = find_api_key(), get_wandb_server()
    if not key:
        raise InvalidInputError(
            f"WANDB_API_KEY is not set, and ~/.netrc has no key for {server}; set it to the key on W&B's page "
            "/authorize, or run `wandb login`",
            field="WANDB_API_KEY",
        )
    variables = {"project": project, "entity": entity, "name": run_id}
    authorization = base64.b64encode(f"api:{key}".encode()).decode()
    try:
        response = httpx.post(
            f"{server}/graphql",
            json={"query": _LAST_STEP_QUERY, "variables": variables, "operationName": "LastStep"},
            headers={"Authorization": f"Basic {authorization}"},
            timeout=30.0,
        )
    except httpx.HTTPError as error:
        raise UnreachableError(f"{server} is unavailable: {error or type(error).__name__}; try again later") from error
    if response.status_code in {401, 403}:
        raise InvalidInputError(
            f"{server} rejects the key in WANDB_API_KEY or ~/.netrc; set a valid key", field="WANDB_API_KEY"
        )
    if response.status_code != 200:
        raise UnreachableError(f"{server} returned HTTP {response.status_code}; try again later")
    model = (response.json().get("data") or {}).get("model") or {}
    tail = json.loads((model.get("bucket") or {}).get("historyTail") or "[]")
    return int(json.loads(tail[-1])["_step"]) if tail else -1


def upload_run(run: RecordedRun) -> str | None:
    """Upload a part of a run with `wandb sync`; return the URL of the run, if known. Raises `SwiftKVError` if that
    fails."""
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", "--include-synced", run.path.name]
    directory = run.path.parent  # wandb leaves a log there
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)  # no shell
    output = done.stdout + done.stderr
    if done.returncode != 0 or "Finished syncing" not in output:
        key = find_api_key() or "\0"
        raise SwiftKVError(f"`wandb sync` of {run.path.name} failed: {output.strip()[-2000:].replace(key, '***')}")
    page = re.search(r"View run .* at (\S+)", output)
    return page[1] if page else None


def _read_records(data: bytes) -> Iterator[bytes]:
    offset, record = len(_FILE_HEADER), b""
    while offset + _FRAGMENT_HEADER.size <= len(data):
        if _BLOCK_BYTES - offset % _BLOCK_BYTES < _FRAGMENT_HEADER.size:
            offset += _BLOCK_BYTES - offset % _BLOCK_BYTES
            continue
        checksum, length, kind = _FRAGMENT_HEADER.unpack_from(data, offset)
        fragment = data[offset + _FRAGMENT_HEADER.size : offset + _FRAGMENT_HEADER.size + length]
        if checksum != zlib.crc32(fragment, zlib.crc32(bytes([kind]))):
            return
        offset += _FRAGMENT_HEADER.size + length
        record += fragment
        if kind in {_FULL, _LAST}:
            yield record
            record = b""


def _frame_records(records: list[bytes]) -> bytes:
    framed = bytearray(_FILE_HEADER)
    for record in records:
        begun, rest = False, record
        while rest or not begun:
            space = _BLOCK_BYTES - len(framed) % _BLOCK_BYTES
            if space < _FRAGMENT_HEADER.size:
                framed += bytes(space)
                continue
            piece, rest = rest[: space - _FRAGMENT_HEADER.size], rest[space - _FRAGMENT_HEADER.size :]
            kind = (_MIDDLE if rest else _LAST) if begun else (_FIRST if rest else _FULL)
            framed += _FRAGMENT_HEADER.pack(zlib.crc32(piece, zlib.crc32(bytes([kind]))), len(piece), kind) + piece
            begun = True
    return bytes(framed)
