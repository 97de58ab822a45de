"""A local hub that speaks the parts of the protocol needed to publish and fetch models, and to read data sets."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes.scripted_server import Answer, Request, json_answer, serve

TOKEN = "hf_publisher"
_REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Hub:
    """Repositories, and the requests that were made."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of data sets."""
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Summary of each commit."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256."""
    uploads: int = 0
    fail_uploads: int = 0
    """Number of large-file uploads that will still fail."""
    fetched: set[str] = field(default_factory=set)
    """Files that were downloaded."""

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Make this the hub of this process, with an empty cache."""
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", self.url)
        files = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", self.url)
        go_online(monkeypatch, True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)

    def answer(self, request: Request) -> Answer:
        path = request.path
        if request.method == "PUT":
            return self._upload(request.raw, path.rpartition("/")[2])
        if match := re.fullmatch(
            r"(?:/api)?/datasets/(?P<repo>.+?)(?P<rest>/(?:resolve|revision|tree|paths-info)/.+)?", path
        ):
            return self._dataset(self.datasets.get(match["repo"]), match["repo"], match["rest"] or "/revision", request)
        if match := re.fullmatch(rf"/{_REPOSITORY}/resolve/\w+/(?P<file>.+)", path):
            return self._file(self.repositories[match["repo"]].get(match["file"]), match["file"], request.method)
        if match := re.fullmatch(rf"/api/models/{_REPOSITORY}/tree/\w+", path):
            files = self.repositories[match["repo"]].items()
            return json_answer(
                [{"type": "file", "path": p, "size": len(data), "oid": _blob(data)} for p, data in files]
            )
        if match := re.fullmatch(rf"/api/models/{_REPOSITORY}/revision/main", path):
            return json_answer({"id": match["repo"], "sha": "0" * 40, "private": True, "tags": [], "siblings": []})
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return json_answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            return self._create(request.body)
        if path == "/api/validate-yaml":
            return json_answer({"errors": [], "warnings": []})
        if match := re.fullmatch(rf"/api/models/{_REPOSITORY}/preupload/main", path):
            return self._preupload(match["repo"], request.body)
        if re.fullmatch(rf"/{_REPOSITORY}\.git/info/lfs/objects/batch", path):
            return self._batch(request.body)
        if match := re.fullmatch(rf"/api/models/{_REPOSITORY}/commit/main", path):
            return self._commit(match["repo"], [json.loads(line) for line in request.raw.splitlines()])
        return json_answer({"error": f"no such address {path}"}, 404)

    def _dataset(self, files: dict[str, bytes] | None, name: str, rest: str, request: Request) -> Answer:
        _, kind, *place = rest.split("/", 3)
        if files is None:
            return Answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if kind == "resolve":
            return self._file(files.get(place[1]), place[1], request.method)
        if kind == "revision":
            return json_answer({"id": name, "sha": "0" * 40, "private": False, "tags": [], "siblings": []})
        if len(place) > 1:
            return self._file(None, place[1], request.method)  # it has no directories
        asked = files if kind == "tree" else [path for path in request.body["paths"] if path in files]
        shown = [{"type": "file", "path": p, "size": len(files[p]), "oid": _blob(files[p])} for p in asked]
        return json_answer(shown)

    def _file(self, data: bytes | None, name: str, method: str) -> Answer:
        headers = {"X-Repo-Commit": "0" * 40, "ETag": f'"{_blob(data or b"")}"'}
        if data is None:
            return Answer(404, b"", {**headers, "X-Error-Code": "EntryNotFound"})
        if method == "GET":
            self.fetched.add(name)
        return Answer(200, data, headers)

    def _upload(self, data: bytes, oid: str) -> Answer:
        if self.fail_uploads:
            self.fail_uploads -= 1
            return json_answer({"error": "refused"}, 403)
        assert hashlib.sha256(data).hexdigest() == oid
        self.objects[oid] = data
        self.uploads += 1
        return json_answer({})

    def _create(self, asked: dict[str, Any]) -> Answer:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            return json_answer({"error": "You already created this model repo", "url": f"{self.url}/{name}"}, 409)
        self.repositories[name] = {}
        self.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return json_answer({"url": f"{self.url}/{name}"})

    def _preupload(self, repository: str, asked: dict[str, Any]) -> Answer:
        present, answers = self.repositories[repository], []
        for file in asked["files"]:
            large, before = file["path"].endswith(".safetensors"), present.get(file["path"])
            oid = None if before is None else hashlib.sha256(before).hexdigest() if large else _blob(before)
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return json_answer({"files": answers})

    def _batch(self, asked: dict[str, Any]) -> Answer:
        def described(item: dict[str, Any]) -> dict[str, Any]:
            if item["oid"] in self.objects:
                return item
            return {**item, "actions": {"upload": {"href": f"{self.url}/upload/{item['oid']}"}}}

        return json_answer({"transfer": "basic", "objects": [described(item) for item in asked["objects"]]})

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> Answer:
        files = self.repositories[repository]
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    self.commits.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        url = f"{self.url}/{repository}/commit/{'1' * 40}"
        return json_answer({"success": True, "commitOid": "1" * 40, "commitUrl": url})


def go_online(monkeypatch: pytest.MonkeyPatch, is_online: bool) -> None:
    """Let this process ask the hub, or only its caches."""
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", not is_online)


@contextmanager
def run_hub() -> Iterator[Hub]:
    hub = Hub()
    with serve(hub) as hub.url:
        yield hub


def _blob(data: bytes) -> str:
    """Return git's object id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
