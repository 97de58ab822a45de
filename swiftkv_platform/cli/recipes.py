"""`swiftkv recipes`: the job specs that ship with the package, to begin from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
import yaml

from swiftkv_platform.cli.context import Json
from swiftkv_platform.cli.output import print_json, print_table, tell
from swiftkv_platform.errors import ConflictError, InvalidInputError

recipes_app = typer.Typer(no_args_is_help=True, help="Job specs that ship with the package.")


@recipes_app.command("list")
def list_recipes(json: Json = False) -> None:
    """List them; docs/recipes.md has what is known of their results."""
    found = {path.stem: _model(path) for path in _paths()}
    if json:
        print_json({"recipes": found})
    else:
        print_table(("recipe", "teacher"), found.items(), empty="No recipes.")


@recipes_app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe, as `swiftkv recipes list` shows it.")],
    to: Annotated[
        Path | None, typer.Argument(metavar="FILE", dir_okay=False, help="A new file. Default: NAME.yaml.")
    ] = None,
    json: Json = False,
) -> None:
    """Copy a recipe to a file of your own, with its comments."""
    target = to or Path(f"{name}.yaml")
    text = recipe(name).read_text(encoding="utf-8")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConflictError(f"{target} exists; name another FILE", field="file", value=str(target)) from error
    tell({"recipe": name, "file": str(target)}, f"{target} is {name}; change it, then submit or distil it.", json=json)


def recipe(name: str) -> Path:
    """The file of a recipe. Raises `InvalidInputError` for a name that none has."""
    paths = {path.stem: path for path in _paths()}
    if name not in paths:
        raise InvalidInputError.of("recipe", name, f"; one of these is accepted: {', '.join(paths)}")
    return paths[name]


def _paths() -> list[Path]:
    return sorted(Path(str(files("swiftkv_platform.jobs") / "recipes")).glob("*.yaml"))


def _model(path: Path) -> str:
    return str(yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["name_or_path"])
