"""A replica's application around a test's engine, clients that call it over ASGI, and models to serve."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from transformers import AutoTokenizer

from swiftkv_platform.engine.frontend import EngineFrontend
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState, ServedModelInfo
from swiftkv_platform.storage.artifacts import hash_manifest, publish_directory, read_manifest
from swiftkv_platform.storage.object_store import open_store
from tests.unit.engine.tiny_models import CONTEXT, save_swiftkv


def version_of(engine: EngineFrontend, model: str = "mdl_1", context: int = CONTEXT, **fields: Any) -> ModelVersion:
    """Return the engine's loaded model as version `model`; `fields` sets more of its description."""
    fields = {"deployment": "dep_1", "manifest_digest": None, "swiftkv": None, **fields}
    return ModelVersion(engine, ServedModelInfo(model=model, max_model_len=context, **fields), created=1)


def application(version: ModelVersion, *, replica: str = "", observers: Any = (), **options: Any) -> FastAPI:
    return create_http_app(ReplicaState(version, replica=replica, observers=observers), **options)


def asgi_client(app: FastAPI) -> httpx.AsyncClient:
    """Return a client without a socket, which needs no closing."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://serve")


def openai_client(app: FastAPI, api_key: str = "none") -> Any:
    """Return OpenAI's own client."""
    return openai.AsyncOpenAI(api_key=api_key, base_url="http://serve/v1", http_client=asgi_client(app), max_retries=0)


def save_chat_model(directory: Path, context: int, template: str) -> Path:
    """Save a SwiftKV student whose tokenizer has a chat template."""
    save_swiftkv(directory, context)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def publish(tmp_path: Path, name: str) -> Path:
    """Publish the directory `name` as an artifact in a directory store; return its path there."""
    store = open_store(str(tmp_path / "store"))
    publish_directory(store, tmp_path / name, name, kind="artifact", lineage={}, metrics={})
    return tmp_path / "store" / name


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A published SwiftKV model."""
    save_swiftkv(tmp_path / "model")
    return publish(tmp_path, "model")


def digest(artifact: Path) -> str:
    return hash_manifest(read_manifest(open_store(str(artifact)), ""))
