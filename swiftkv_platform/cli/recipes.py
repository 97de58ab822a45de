"""`swiftkv recipes`: the job specs that ship with the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.context import Json
from swiftkv_platform.cli.output import Columns, print_items, print_json, print_result
from swiftkv_platform.errors import ConflictError

if TYPE_CHECKING:
    from swiftkv_platform.specs import JobSpec

recipes_app = typer.Typer(no_args_is_help=True, add_completion=False)

_SCHEMA_COMMENT = "# yaml-language-server: $schema="


def describe_recipe(name: str, description: str, spec: Mapping[str, Any] | JobSpec) -> dict[str, str]:
    """Return name, teacher, GPUs, expected time and purpose of a recipe."""
    from swiftkv_platform.sources.recipes import split_description
    from swiftkv_platform.specs import JobSpec

    job = JobSpec.model_validate(spec)
    resources = job.resources
    gpus = resources.max_workers * resources.gpus_per_worker
    kind = resources.accelerator_type or "any"
    purpose, time = split_description(description)
    return {
        "recipe": name,
        "teacher": job.model.name_or_path,
        "GPUs": f"{gpus:g} ({kind})" if gpus else "none",
        "time": time,
        "purpose": purpose,
    }


def print_recipes(recipes: list[dict[str, str]]) -> None:
    columns: Columns = {name: name for name in ("recipe", "teacher", "GPUs", "time", "purpose")}
    print_items(recipes, columns, empty="No recipes.")


@recipes_app.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes with teacher, GPUs, expected time and purpose; docs/training.md has their known results."""
    import yaml

    from swiftkv_platform.sources.recipes import find_recipes, read_description

    texts = {name: path.read_text(encoding="utf-8") for name, path in find_recipes().items()}
    found = [describe_recipe(name, read_description(text), yaml.safe_load(text)) for name, text in texts.items()]
    if json:
        print_json({"recipes": found})
    else:
        print_recipes(found)


@recipes_app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe, as `swiftkv recipes list` shows it.")],
    to: Annotated[
        Path | None, typer.Argument(metavar="FILE", dir_okay=False, help="New file. Default: NAME.yaml.")
    ] = None,
    json: Json = False,
) -> None:
    """Copy a recipe, including its comments, to a new file. Editors find the spec's schema by its first line."""
    from swiftkv_platform.sources.recipes import JOB_SCHEMA, find_recipe, remove_editor_comment

    target = to or Path(f"{name}.yaml")
    text = remove_editor_comment(find_recipe(name).read_text(encoding="utf-8"))
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(f"{_SCHEMA_COMMENT}{JOB_SCHEMA.as_uri()}\n{text}")
    except FileExistsError as error:
        raise ConflictError(f"{target} already exists; use another FILE", field="file", value=str(target)) from error
    print_result(
        {"recipe": name, "file": str(target)},
        f"Copied {name} to {target}. Edit it, then run `swiftkv jobs submit -f {target}` or `swiftkv distill`.",
        json=json,
    )
