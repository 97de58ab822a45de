"""Buckets of Google and Azure are opened with a pod's own identity, over the protocols of their token servers.

Neither cloud runs here: a script gives their documented answers.
"""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from swiftkv_platform.storage.object_store import open_store
from tests.support.fakes.scripted_server import Answer, Script, json_answer, problem_answer, serve

TOKEN = {"access_token": "of-this-pod", "expires_in": 3600, "token_type": "Bearer"}

OBJECT = Answer(200, b"data", {"ETag": '"1"', "Last-Modified": "Fri, 27 Nov 2026 01:00:00 GMT"})

GOOGLES = "/computeMetadata/v1/instance/service-accounts/default/token"
"""Path of tokens on the metadata server of a GKE node."""

MICROSOFTS = "/tenant/oauth2/v2.0/token"
"""Path that exchanges the token of a pod's service account, which AKS writes to a file."""


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_google_is_asked_with_the_identity_of_the_node_or_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.on("GET", GOOGLES, json_answer(TOKEN))
    script.on("GET", "/bucket/models%2Fa", OBJECT)
    with serve(script) as url:
        monkeypatch.setenv("GCE_METADATA_HOST", urlsplit(url).netloc)
        monkeypatch.setenv("GOOGLE_BASE_URL", url)
        store = open_store("gs://bucket/models", patient=False)
        assert store.get_bytes("a") == b"data"
        # Signing needs a role that this identity lacks: the control plane then passes the object on itself.
        assert store.create_presigned_url("a", 60) is None
    [asked] = script.sent("GET", GOOGLES)[:1]
    assert asked.headers["metadata-flavor"] == "Google"
    [read] = script.sent("GET", "/bucket/models%2Fa")
    assert read.headers["authorization"] == "Bearer of-this-pod"


def test_azure_is_asked_with_the_identity_of_the_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, file = Script(), tmp_path / "token"
    file.write_text("the-service-accounts")
    script.on("POST", MICROSOFTS, json_answer(TOKEN))
    script.on("POST", "/", problem_answer(403, "no delegation key for you"))
    script.on("GET", "/container/models/a", OBJECT)
    with serve(script) as url:
        for name, value in {
            "AZURE_STORAGE_ACCOUNT_NAME": "acme",
            "AZURE_CLIENT_ID": "client",
            "AZURE_TENANT_ID": "tenant",
            "AZURE_FEDERATED_TOKEN_FILE": str(file),
            "AZURE_AUTHORITY_HOST": url,
            "AZURE_STORAGE_ENDPOINT": url,
        }.items():
            monkeypatch.setenv(name, value)
        store = open_store("az://container/models", patient=False)
        assert store.get_bytes("a") == b"data"
        assert [store.create_presigned_url(key, 60) for key in ("a", "b")] == [None, None]
    exchanged = parse_qs(script.sent("POST", MICROSOFTS)[0].raw.decode())
    assert (exchanged["client_id"], exchanged["client_assertion"]) == (["client"], ["the-service-accounts"])
    [read] = script.sent("GET", "/container/models/a")
    assert read.headers["authorization"] == "Bearer of-this-pod"
    assert len(script.sent("POST", "/")) == 1, "Azure is asked to sign once only"
