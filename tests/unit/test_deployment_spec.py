"""Each field of the deployment spec is in every schema and command derived from it, with the same bounds."""

from typing import Any

import pytest

from swiftkv_platform.cli.app import load_commands
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.serve.args import ServeArgs, ServedConfig
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import DeploymentSpec, ResolvedDeployment

FIELDS = sorted(DeploymentSpec.model_fields)

ABSENT = {("PATCH", "route_prefix"): "a deployment keeps its address"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(Settings(_env_file=None)).openapi()


def resolved(schema: Any, document: dict[str, Any]) -> Any:
    """A schema with its references resolved, without titles, descriptions and defaults."""
    if isinstance(schema, list):
        return [resolved(item, document) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return resolved(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    words = ("title", "default", "description")
    return {
        key: resolved(value, document) for key, value in schema.items() if key not in words or isinstance(value, dict)
    }


def form(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Properties of the body of POST or PATCH on `/deployments`, or of the answer."""
    if name == "PATCH":
        part = document["paths"]["/deployments/{deployment_id}"]["patch"]["requestBody"]
    else:
        post = document["paths"]["/deployments"]["post"]
        part = post["requestBody"] if name == "POST" else post["responses"]["201"]
    reference = part["content"]["application/json"]["schema"]["$ref"]
    schema: dict[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return dict(schema["properties"])


def present(name: str, fields: Any) -> list[str]:
    """Fields of the spec among `fields`, and those that this form lacks on purpose and really does not have."""
    absent = {field for form_name, field in ABSENT if form_name == name}
    return sorted((set(fields) & set(FIELDS)) | (absent - set(fields)))


def test_every_field_is_stored_and_handed_to_replicas() -> None:
    assert present("stored", ResolvedDeployment.model_fields) == FIELDS
    assert present("replicas", {**ServeArgs.model_fields, **ServedConfig.model_fields}) == FIELDS


def test_every_field_is_on_the_command_line_with_its_description() -> None:
    command = load_commands().commands["deploy"]
    parameters = {parameter.name: parameter for parameter in command.params}
    assert present("command line", parameters) == FIELDS
    for name in set(FIELDS) - {"model"}:
        described = " ".join(str(DeploymentSpec.model_fields[name].description).split())
        assert parameters[name].help.startswith(described)


def test_every_field_is_in_the_interface_with_the_bounds_and_description_of_the_spec(document: dict[str, Any]) -> None:
    for name in ("POST", "PATCH", "answer"):
        assert present(name, form(document, name)) == FIELDS
    for field in FIELDS:
        if ("PATCH", field) in ABSENT:
            continue
        wanted, changed = (form(document, name)[field] for name in ("POST", "PATCH"))
        assert changed["description"].startswith(wanted["description"])
        assert "default" not in changed, "fields left out of a patch keep their values"
        if field in ("engine", "candidate", "capture"):  # objects, whose parts change alone
            assert {"type": "null"} in changed["anyOf"]
        else:
            assert resolved(changed, document) == resolved(wanted, document)
