"""Contract of adapters in an object store: published, fetched, and applied to a base in the same store."""

from pathlib import Path
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import convert, export_adapter
from swiftkv_platform.model.weights.adapters import whole_model
from swiftkv_platform.model.weights.bases import model_directory
from swiftkv_platform.sources import Access
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import fetch_directory, publish_directory
from swiftkv_platform.storage.downloads import download_model
from swiftkv_platform.storage.object_store import ObjectStore
from tests.support.checkpoints import SHAPE, save
from tests.support.s3_servers import S3Server, use
from tests.support.tiny_models import disturb, family_teacher

S3 = [pytest.param(name, marks=pytest.mark.slow) for name in ("rclone_server", "moto_server")]


@pytest.fixture(params=["local", *S3])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an empty prefix of a store."""
    if request.param == "local":
        return str(tmp_path / "store")
    found = request.getfixturevalue(request.param)
    server: S3Server = getattr(found, "server", found)
    return use(server, monkeypatch)


def upload(store: ObjectStore, directory: Path, prefix: str) -> None:
    """Upload a model as its owner would, without a manifest."""
    for path in directory.iterdir():
        store.upload_file(path, f"{prefix}/{path.name}")


def test_an_adapter_and_its_base_come_back_as_the_whole_artifact(uri: str, tmp_path: Path) -> None:
    base = save(family_teacher("qwen2"), tmp_path / "base", max_shard_size="100KB")
    full = save(disturb(convert(base, **SHAPE)), tmp_path / "full")
    name = f"{uri}/base"
    export_adapter(full, tmp_path / "adapter", base=base, name_or_path=name)
    store = open_store(uri)
    upload(store, base, "base")
    publish_directory(store, tmp_path / "adapter", "artifact", kind="artifact", lineage={}, metrics={})
    fetch_directory(store, "artifact", tmp_path / "fetched")

    def applied(access: Access) -> torch.Tensor:
        def download(address: str) -> Path:
            return download_model(address, tmp_path / f"base-{uuid4().hex}", access=access, field="base")

        def find(reference: object) -> str:
            return model_directory(name, access=access, download=download, field="base")

        with whole_model(tmp_path / "fetched", find_base=find) as (directory, _), torch.no_grad():
            found: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory)(torch.arange(20)[None]).logits
        return found

    expected = AutoModelForCausalLM.from_pretrained(full)(torch.arange(20)[None]).logits
    assert torch.equal(applied(Access(roots=(uri,))), expected)
    with pytest.raises(InvalidInputError, match="may not read"):
        applied(Access(roots=(f"{uri}/elsewhere",)))
    weights = next(info.key for info in store.list("base") if info.key.endswith(".safetensors"))
    store.put_bytes(weights, store.get_bytes(weights)[:-1] + b"\x7f")
    with pytest.raises(ModelError, match="has the SHA-256"):
        applied(Access(roots=(uri,)))
