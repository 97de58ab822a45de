"""A hub on this machine that speaks as much of its protocol as models need that are published or fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_server import running

TOKEN = "hf_publisher"
_REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Hub:
    """Repositories, and what was asked of them."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Summary of each commit."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    uploads: int = 0
    fail_uploads: int = 0
    """Uploads of large files that are still to fail."""
    fetched: set[str] = field(default_factory=set)
    """Files that were downloaded."""

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Make this the hub of this process, with an empty cache."""
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", self.url)
        files = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)


@contextmanager
def run_hub() -> Iterator[Hub]:
    hub = Hub()
    with running(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Keep the tests' output to themselves."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(rf"/{_REPOSITORY}/resolve/\w+/(?P<file>.+)", path):
            self._file(self.hub.repositories[match["repo"]].get(match["file"]), match["file"])
        elif match := re.fullmatch(rf"/api/models/{_REPOSITORY}/tree/\w+", path):
            files = self.hub.repositories[match["repo"]]
            rows = [{"type": "file", "path": p, "size": len(data), "oid": _blob(data)} for p, data in files.items()]
            self._answer(rows)
        elif match := re.fullmatch(rf"/api/models/{_REPOSITORY}/revision/main", path):
            self._answer({"id": match["repo"], "sha": "0" * 40, "private": True, "tags": [], "siblings": []})
        else:
            self._answer({"error": f"no such address {path}"}, status=404)

    do_HEAD = do_GET  # noqa: N815

    def _file(self, data: bytes | None, name: str) -> None:
        self.send_response(200 if data is not None else 404)
        if data is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{_blob(data or b"")}"')
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if self.command == "GET" and data is not None:
            self.hub.fetched.add(name)
            self.wfile.write(data)

    def do_PUT(self) -> None:
        data, oid = self._body(), self.path.rpartition("/")[2]
        if self.hub.fail_uploads:
            self.hub.fail_uploads -= 1
            self._answer({"error": "refused"}, status=403)
        else:
            assert hashlib.sha256(data).hexdigest() == oid
            self.hub.objects[oid] = data
            self.hub.uploads += 1
            self._answer({})

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, status=401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif match := re.fullmatch(rf"/api/models/{_REPOSITORY}/preupload/main", path):
            self._preupload(match["repo"], json.loads(body))
        elif re.fullmatch(rf"/{_REPOSITORY}\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body))
        elif match := re.fullmatch(rf"/api/models/{_REPOSITORY}/commit/main", path):
            self._commit(match["repo"], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": f"no such address {path}"}, status=404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            self._answer({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, status=409)
            return
        self.hub.repositories[name] = {}
        self.hub.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        self._answer({"url": f"{self.hub.url}/{name}"})

    def _preupload(self, repository: str, asked: dict[str, Any]) -> None:
        present, answers = self.hub.repositories[repository], []
        for file in asked["files"]:
            large, before = file["path"].endswith(".safetensors"), present.get(file["path"])
            oid = None if before is None else hashlib.sha256(before).hexdigest() if large else _blob(before)
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer({"files": answers})

    def _batch(self, asked: dict[str, Any]) -> None:
        def answer(item: dict[str, Any]) -> dict[str, Any]:
            if item["oid"] in self.hub.objects:
                return item
            return {**item, "actions": {"upload": {"href": f"{self.hub.url}/upload/{item['oid']}"}}}

        self._answer({"transfer": "basic", "objects": [answer(item) for item in asked["objects"]]})

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        files = self.hub.repositories[repository]
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.hub.commits.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        url = f"{self.hub.url}/{repository}/commit/{'1' * 40}"
        self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": url})

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        data = b""
        while size := int(self.rfile.readline().strip(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, document: Any, *, status: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _blob(data: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
