"""Arguments, and loading a verified artifact; without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.engine import AsyncLLMEngine, SamplingParams
from swiftkv_platform.errors import ArtifactCorruptError, InvalidInputError, ModelError
from swiftkv_platform.model import export_adapter
from swiftkv_platform.serve.args import ReplicaArgs, ServeArgs, Served
from swiftkv_platform.serve.deployment import Loaded, load, load_version, model_card
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import manifest_digest, publish_directory, read_manifest
from tests.checkpoints import rewrite
from tests.unit.engine.tiny_models import make_model, save_dense, save_swiftkv

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
    card = model_card(REPLICA, served(artifact), loaded, {})
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
    assert list(version.card.load_seconds) == ["fetch", "load", "check"]
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
    card = model_card(REPLICA, unverified, load(unverified), {})
    assert (card.manifest_digest, card.swiftkv) == (None, None)


@pytest.fixture
def adapter(artifact: Path, tmp_path: Path) -> Path:
    """The artifact as an adapter of a base in `own`, published beside it."""
    make_model().save_pretrained(tmp_path / "own" / "base")
    export_adapter(tmp_path / "model", tmp_path / "adapter", base=tmp_path / "own" / "base")
    store = open_store(str(tmp_path / "store"))
    publish_directory(store, tmp_path / "adapter", "b", kind="artifact", lineage={}, metrics={})
    return tmp_path / "store" / "b"


def answered(loaded: Loaded) -> Any:
    assert isinstance(loaded.engine, AsyncLLMEngine)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    (output,) = loaded.engine.engine.generate([[1, 2, 3, 4, 5]], params)
    return output.token_ids, output.logprobs, output.prompt_logprobs


def test_an_adapter_is_served_with_its_base_as_the_whole_artifact_is(
    adapter: Path, artifact: Path, tmp_path: Path
) -> None:
    rules = {"roots": [str(tmp_path / "own")], "hub_organizations": []}
    loaded = load(served(adapter, base_access=rules))
    assert loaded.manifest_digest == manifest_digest(read_manifest(open_store(str(adapter)), ""))
    assert answered(loaded) == answered(load(served(artifact)))
    assert answered(load(served(adapter, engine={"swiftkv": False}))) == answered(
        load(served(artifact, engine={"swiftkv": False}))
    )


def test_a_base_outside_the_tenants_roots_is_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"base\.name_or_path is '.*base', which this tenant may not read"):
        load(served(adapter, base_access={"roots": [str(tmp_path / "others")]}))
    link = tmp_path / "own" / "base" / "generation_config.json"
    link.unlink()
    (tmp_path / "secret.json").write_text("{}")
    link.symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelError, match="leads to a place"):
        load(served(adapter, base_access={"roots": [str(tmp_path / "own")]}))


def test_a_base_that_has_changed_is_refused(adapter: Path, tmp_path: Path) -> None:
    rewrite(tmp_path / "own" / "base", lambda tensors: tensors["model.norm.weight"].mul_(2))
    with pytest.raises(ModelError, match=r"model\.norm\.weight of .* has the SHA-256") as caught:
        load(served(adapter))
    assert caught.value.field == "base.name_or_path"


def test_other_rules_alone_load_nothing(adapter: Path) -> None:
    closed = served(adapter, base_access={"roots": ["/elsewhere"], "hub_organizations": ["acme"]})
    assert closed.loads_the_same_as(served(adapter))
