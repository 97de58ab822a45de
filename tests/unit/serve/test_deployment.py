"""Arguments, and loading a verified artifact; without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serve.args import ReplicaArgs, ServeArgs, Served
from serve.deployment import load, load_version, model_card
from serve.metrics import Metrics
from swiftkv_platform.engine import AsyncLLMEngine
from swiftkv_platform.errors import ArtifactCorruptError, ModelError
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import manifest_digest, publish_directory, read_manifest
from tests.unit.engine.tiny_models import save_dense, save_swiftkv

ARGS: dict[str, Any] = {"id": "dep_1", "model": "mdl_1", "artifact_uri": "unused"}
REPLICA = ReplicaArgs(id="dep_1")


def served(artifact_uri: Path, **options: Any) -> Served:
    return Served(model="mdl_1", artifact_uri=str(artifact_uri), **options)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A published SwiftKV model in a directory store."""
    save_swiftkv(tmp_path / "model")
    store = open_store(str(tmp_path / "store"))
    publish_directory(store, tmp_path / "model", "a", kind="artifact", lineage={}, metrics={})
    return tmp_path / "store" / "a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "colour"),
        ({"engine": {"colour": "red"}}, "engine.colour"),
        ({"min_replicas": -1}, "min_replicas"),
        ({"artifact_uri": None}, "given together"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2 is below min_replicas 3"),
        ({"route_prefix": "v1"}, "route_prefix"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests"),
        ({"artifact_uri": "hf:org/name"}, "needs verify: false"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServeArgs.model_validate(ARGS | change)


def test_a_verified_artifact_is_served_with_its_digest(artifact: Path) -> None:
    loaded = load(served(artifact))
    store = open_store(str(artifact))
    card = model_card(REPLICA, served(artifact), loaded)
    assert card.manifest_digest == manifest_digest(read_manifest(store, ""))
    assert card.swiftkv == {"num_hidden_layers": 4, "num_key_value_layers": 2, "key_value_group_size": 2}
    assert isinstance(loaded.engine, AsyncLLMEngine)
    assert len(loaded.engine.engine.generate(["text"])[0].token_ids) > 0


async def test_replicas_of_a_machine_fetch_a_model_once_and_tell_how_long_each_phase_took(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWIFTKV_MODEL_CACHE_BYTES", str(1 << 30))
    metrics = Metrics()
    for _ in range(2):
        version = await load_version(REPLICA, served(artifact), loaded=metrics.loaded)
        await version.engine.aclose()
        (artifact / "model.safetensors").unlink(missing_ok=True)  # the second replica reads nothing but the manifest
    [copy] = [path for path in (tmp_path / "home" / "models").iterdir() if path.is_dir()]
    assert copy.name == version.card.manifest_digest
    text = metrics.text().decode()
    assert "swiftkv:model_loads_total 2.0" in text
    for phase in ("fetch", "load", "check"):
        [line] = [
            line for line in text.splitlines() if line.startswith(f'swiftkv:model_load_seconds_total{{phase="{phase}"')
        ]
        assert float(line.split()[-1]) > 0


def test_a_flipped_byte_is_refused(artifact: Path) -> None:
    weights = artifact / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactCorruptError, match=r"model\.safetensors"):
        load(served(artifact))


def test_a_plain_directory_is_served_only_unverified(tmp_path: Path) -> None:
    save_dense(tmp_path)
    with pytest.raises(ModelError, match=r"no manifest.json.*verify: false") as caught:
        load(served(tmp_path))
    assert caught.value.field == "artifact_uri"
    unverified = served(tmp_path, verify=False)
    card = model_card(REPLICA, unverified, load(unverified))
    assert (card.manifest_digest, card.swiftkv) == (None, None)
