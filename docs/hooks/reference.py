"""Pages that MkDocs generates from the code at every build, so that they stay current."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

import openapi_page
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from schema_tables import fields, link_to
from typer.cli import get_docs_for_click

from swiftkv_platform.cli.app import load_commands
from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec

ROOT = Path(__file__).parent.parent.parent

OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "infra/README.md": "installation.md",
}
"""Files of the repository that are pages of the site, and the names of these pages."""
_LINK = re.compile(r"\]\(([^)#:]+)(?=[)#])")

CONTROL_PLANE = """\
Made from the application's own OpenAPI document; a running control plane shows the same at `/docs`. Lists
take `after`, `limit` and `order`. Every error is a [Problem](#object-problem), `application/problem+json`
(RFC 9457); `code` is stable, `errors` names each field that was refused. 401: no key, or an unknown one; 403:
a key without the scope; 404: not there, or another tenant's; 409: not possible in this state; 413: body too
large; 422: a field is refused; 503 with `Retry-After`: the database, Ray or the store does not answer."""
SERVING = """\
What a replica answers, at the deployment's `url`. Errors are problem documents as the [control
plane's](control-plane.md), below `/v1` in OpenAI's form; 429 with `Retry-After`: the queue is full, 504:
`timeout_s` has passed."""
JOB_SPEC = """\
The body of `POST /jobs`, in YAML or JSON; unknown keys are refused. `swiftkv jobs schema` prints it as a JSON
schema, and [recipes](../training.md#recipes) are examples."""
SETTINGS = """\
Read from the environment by the control plane and the command line. Credentials keep the names that their own
libraries read: `AWS_*`, `WANDB_API_KEY`, `HF_TOKEN`."""
TENANTS_FILE = """\
Keys of `default` and of each tenant in the file that `SWIFTKV_TENANTS_FILE` names
([rules](../operations.md#quotas-and-fair-share))."""
COMPUTED = {
    "home": "`~/.swiftkv`",
    "api_keys_file": "`{home}/keys.json` if it exists",
    "serve_api_keys_file": "`api_keys_file`, if Ray is local",
    "serve_oidc_file": "`oidc_file`, if Ray is local",
}
"""Defaults of settings that depend on the machine or on other settings."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {
        "reference/control-plane.md": openapi_page.page(
            create_app(Settings(_env_file=None)).openapi(), title="Control plane", introduction=CONTROL_PLANE
        ),
        "reference/serving.md": openapi_page.page(
            create_http_app(ReplicaState(replica="reference")).openapi(), title="Serving", introduction=SERVING
        ),
        "reference/job-spec.md": job_spec(),
        "reference/settings.md": settings(),
        "reference/cli.md": cli(),
        **{
            page: link_within_site((ROOT / file).read_text(), posixpath.dirname(file)) for file, page in OUTSIDE.items()
        },
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the page's text with links that work on the site."""
    return link_within_site(markdown, "docs") if "/" not in page.file.src_uri else markdown


def link_within_site(markdown: str, directory: str) -> str:
    """Return the text of a file in `directory` of the repository, e.g. "infra", with the site's links:
    ../docs/operations.md -> operations.md, ../SECURITY.md -> security.md."""

    def get_site_link(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(directory, link[1]))
        return f"]({OUTSIDE.get(path, path.removeprefix('docs/'))}"

    return _LINK.sub(get_site_link, markdown)


def job_spec() -> str:
    """Return the page of the job spec and the objects in it, the outermost first."""
    schema = JobSpec.model_json_schema()
    lines = ["# Job spec", "", JOB_SPEC, "", *fields(schema)]
    for name, inner in schema["$defs"].items():
        lines += [f"## {name} {{ #{link_to(name)} }}", "", *fields(inner)]
    return "\n".join(lines)


def settings() -> str:
    """Return the page of the environment variables and of the keys of the tenants file."""
    lines = ["# Settings", "", SETTINGS, "", "| variable | default | |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = COMPUTED[name] if field.default_factory else f"`{field.default!r}`"
        lines.append(f"| `SWIFTKV_{name.upper()}` | {default} | {' '.join((field.description or '').split())} |")
    schema = TenantPolicy.model_json_schema()
    webhook = schema.pop("$defs")["WebhookSpec"]
    lines += ["", "## Tenants file", "", TENANTS_FILE, "", *fields(schema)]
    lines += [f"### Webhook {{ #{link_to('WebhookSpec')} }}", "", *fields(webhook)]
    return "\n".join(lines) + "\n"


def cli() -> str:
    """Return the page with every command's `--help`."""
    os.environ["COLUMNS"] = "100"
    command = load_commands()
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="swiftkv", title="Command line")
