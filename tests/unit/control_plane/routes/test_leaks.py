"""Secrets are planted wherever the platform gets them, and looked for wherever it writes or answers."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.logs import REDACTED, configure_logging, find_secrets, get_logger, redact
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.unit.control_plane.routes.conftest import SPEC, Server, control_plane, make_parts

WEBHOOK = "webhook-secret-1f0c7a"
ENVIRONMENT = {
    "WANDB_API_KEY": "wandb-key-77d31e5b",
    "AWS_SECRET_ACCESS_KEY": 's3/secret+"quoted"\\e4',
    "HF_TOKEN": "hf_token_5a5a5a5a",
    "SWIFTKV_DATABASE_URL": "postgresql+psycopg://swiftkv:db-password-9@db/swiftkv",
}
PLANTED = [WEBHOOK, "wandb-key-77d31e5b", 's3/secret+"quoted"\\e4', "hf_token_5a5a5a5a", "db-password-9"]


def found_in(content: bytes, secrets: list[str]) -> list[str]:
    written = [(secret, {secret.encode(), json.dumps(secret)[1:-1].encode()}) for secret in secrets]
    return [secret for secret, forms in written if any(form in content for form in forms)]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    import structlog

    stream = io.StringIO()
    configure_logging(level=0)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(stream))  # stderr is replaced by commands
    yield stream
    structlog.reset_defaults()


def test_no_planted_secret_is_written_or_told(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    outside, inside = tmp_path / "operator", tmp_path / "written"
    (outside / "secrets" / "acme").mkdir(parents=True)
    (outside / "secrets" / "acme" / "signing").write_text(WEBHOOK)
    keys = outside / "keys.json"
    token = create_key(keys, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    inside.mkdir()
    parts = make_parts(inside, empty_database)
    nobody = "http://127.0.0.1:9"
    settings = Settings(
        home=inside,
        api_keys_file=keys,
        secrets_dir=outside / "secrets",
        webhook_origins=(nobody,),
        database_url=None,
        _env_file=None,
    )
    answers: list[bytes] = []
    with control_plane(parts, settings, "http://swiftkv.example") as client:
        client.headers["authorization"] = f"Bearer {token}"
        client.event_hooks["response"].append(lambda response: answers.append(response.read()))
        server = Server(client, parts, settings)
        spec = {**SPEC, "webhook": {"url": nobody, "secret_ref": "signing"}, "fault_tolerance": {"max_retries": 0}}
        spoiled = "; ".join([*ENVIRONMENT.values(), *PLANTED[1:]])
        for outcome in (SubmissionStatus.SUCCEEDED, SubmissionStatus.FAILED):
            job_id = server.client.post("/jobs", json=spec).json()["id"]
            server.tick()
            worker = server.worker(job_id)
            worker.say("status", status="running")
            worker.say("message", f"connecting with {spoiled}", environment=dict(ENVIRONMENT))
            worker.step(1, time=1000.0)
            if outcome is SubmissionStatus.SUCCEEDED:
                worker.artifact()
            else:
                worker.say("error", f"refused: {spoiled}", code="storage_error", retryable=False)
            server.cluster.submissions[f"{job_id}-1"].log = f"environment: {spoiled}\n"
            server.cluster.finish(f"{job_id}-1", outcome, spoiled)
            server.tick()
            for path in ("", "/events", "/logs", "/metrics", "/artifacts", "/checkpoints"):
                assert server.client.get(f"/jobs/{job_id}{path}").status_code == 200
        get_logger().error("a library's own words", reason=spoiled)
        server.client.get("/jobs", headers={"authorization": f"Bearer {token}x"})
        server.client.post("/jobs", json={**SPEC, "webhook": {"url": "http://x:y@evil", "secret_ref": "signing"}})
        for path in ("/jobs", "/models", "/deployments", "/quota", "/metrics", "/openapi.json", "/readyz"):
            server.client.get(path)
    secrets = [*PLANTED, token]
    files = [path for path in inside.rglob("*") if path.is_file()]
    assert any(path.name.startswith("test.db") for path in files)
    assert any(path.name == "logs.txt" for path in files)
    assert [(path, found) for path in files if (found := found_in(path.read_bytes(), secrets))] == []
    assert [found for answer in answers if (found := found_in(answer, secrets))] == []
    assert found_in(log.getvalue().encode(), secrets) == []
    assert REDACTED in log.getvalue(), "secrets did reach the log, and were redacted"


def test_what_counts_as_a_secret() -> None:
    assert find_secrets(ENVIRONMENT) == {*ENVIRONMENT.values(), "db-password-9"} - {ENVIRONMENT["SWIFTKV_DATABASE_URL"]}
    assert (
        find_secrets({"SWIFTKV_API_KEYS_FILE": "/etc/swiftkv/keys.json", "KEY": "short", "PATH": "/usr/bin"}) == set()
    )
    assert redact("a hf_token_5a5a5a5a b", ENVIRONMENT) == f"a {REDACTED} b"


PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----\n"
AZURE = "DefaultEndpointsProtocol=https;AccountName=store;AccountKey=QWNjb3VudEtleQ==;EndpointSuffix=core.windows.net"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("AZURE_STORAGE_CONNECTION_STRING", AZURE, AZURE),
        ("AZURE_STORAGE_CONNECTION_STRING", AZURE, "QWNjb3VudEtleQ=="),
        ("SERVICE_BUS", "Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey=c2hhcmVkS2V5", "c2hhcmVkS2V5"),
        ("AZURE_STORAGE_SAS", "sv=2026&sig=c2lnbmF0dXJl", "sv=2026&sig=c2lnbmF0dXJl"),
        ("BLOB_URL", "https://store.blob.core.windows.net/c?sv=2026&sig=c2ln%2BbmF0dXJl", "c2ln+bmF0dXJl"),
        ("SENTRY_DSN", "https://0123456789abcdef@sentry.example/1", "0123456789abcdef"),
        ("PIP_INDEX_URL", "https://ghp_0123456789@pypi.example/simple", "ghp_0123456789"),
        ("REDIS", "redis://:first-password@a:1,redis://:other-password@b:1", "other-password"),
        ("DATABASE_URL", "postgresql://u:pass%2Fword-9@host/db", "pass/word-9"),
        ("ODBC", "Driver={PostgreSQL};Server=db;Uid=u;Pwd=odbc-password;", "odbc-password"),
        ("SSH_PASSPHRASE", "correct horse battery", "correct horse battery"),
        ("BASIC_AUTH", "user:basic-password", "user:basic-password"),
        ("GPG_PASS", "gpg-password", "gpg-password"),
        ("SIGNING_PEM", PEM, "MIIEvQIBADANBgkq"),
        ("ACCOUNT", json.dumps({"type": "service_account", "private_key": PEM}), "MIIEvQIBADANBgkq"),
        ("DOCKER_CONFIG_JSON", json.dumps({"auths": {"r": {"auth": "dXNlcjpwYXNz"}}}), "dXNlcjpwYXNz"),
    ],
)
def test_credentials_of_other_services_are_redacted(name: str, value: str, secret: str) -> None:
    assert redact(f"failed with {secret}.", {name: value}) == f"failed with {REDACTED}."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "/home/ann/project"),
        ("SSH_AUTH_SOCK", "/tmp/ssh-agent.1"),
        ("DATABASE_URL", "postgresql://swiftkv_user@database.example/swiftkv"),
        ("SWIFTKV_SERVE_URL", "http://swiftkv.example:8001/path?page=sections"),
        ("PASSENGER_HOME", "/opt/passenger"),
        ("ACCOUNT", json.dumps({"type": "service_account", "project_id": "distillation"})),
    ],
)
def test_what_is_no_credential_stays(name: str, value: str) -> None:
    assert redact(f"it is {value}", {name: value}) == f"it is {value}"
