"""Job specs to start from: `swiftkv recipes`, and a spec made from a few options (model, data, machine)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from swiftkv_platform.cli.context import Json
from swiftkv_platform.cli.output import print_json, print_table, tell
from swiftkv_platform.cli.sources import model_config
from swiftkv_platform.errors import ConflictError
from swiftkv_platform.planning.config import Fields
from swiftkv_platform.sources.names import absolute
from swiftkv_platform.sources.recipes import recipe, recipes, suited_to_cpu

recipes_app = typer.Typer(no_args_is_help=True, help="Job specs that ship with the package.")


@recipes_app.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes; docs/recipes.md has their known results."""
    found = {name: _model(path) for name, path in recipes().items()}
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
    """Copy a recipe, with its comments, to a new file."""
    target = to or Path(f"{name}.yaml")
    text = recipe(name).read_text(encoding="utf-8")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConflictError(f"{target} already exists; name another FILE", field="file", value=str(target)) from error
    tell(
        {"recipe": name, "file": str(target)},
        f"Copied {name} to {target}; change it, then submit or distil it.",
        json=json,
    )


def _model(path: Path) -> str:
    return str(yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["name_or_path"])


_CPU_ROW, _GPU_ROW = 512, 4096
"""Most tokens of a row."""
_CPU_STEPS = 200


def job_document(
    model: str,
    data: Sequence[str],
    *,
    name: str,
    gpus: int,
    steps: int | None,
    num_key_value_layers: int | None,
    prefill_layers: Sequence[int] | None = None,
    key_value_group_size: int,
) -> dict[str, Any]:
    """Return a job spec that distils `model` on `data` with this machine's resources.

    Rows are as long as the model's context, at most 512 tokens on a CPU and 4,096 on a GPU. Quality is measured and
    reported; no gate refuses the result. Paths are made absolute, so that the spec works from any directory.

    Args:
        data: files, directories or hub data sets.
        gpus: number of GPUs, with one worker each; 0 trains on all CPUs in one worker.
        steps: training steps; None: 200 on a CPU, else two epochs.

    Raises:
        InvalidInputError: a name of a model or data set is not valid.
        ModelError: the model's configuration cannot be read.
    """
    context = Fields(model_config(model)).optional_count("max_position_embeddings", "n_positions")
    longest = _GPU_ROW if gpus else _CPU_ROW
    shape = {"num_key_value_layers": num_key_value_layers, "prefill_layers": prefill_layers}
    layers = {name: value for name, value in shape.items() if value is not None}
    document: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100] or "student",
        "model": {"name_or_path": absolute(model, "model", "model"), "dtype": "bfloat16"},
        "swiftkv": {**layers, "key_value_group_size": key_value_group_size},
        "data": {
            "sources": [{"name_or_path": absolute(each, "data", "data")} for each in data],
            "max_length": longest if context is None else min(longest, context),
            "train_on": "assistant",
            "validation_fraction": 0.05,
        },
        "training": {} if steps is None else {"max_steps": steps},
        "evaluation": {"max_tokens": 16384, "max_kl": None, "min_top1_agreement": None, "max_needle_drop": None},
    }
    if gpus:
        document["training"] |= {"gradient_checkpointing": prefill_layers is None}
        document["sharding"] = {"strategy": "ddp" if gpus == 1 else "fsdp2"}
        document["resources"] = {"num_workers": gpus, "gpus_per_worker": 1, "cpus_per_worker": 1}
    else:
        document = suited_to_cpu(document)
        document["training"] |= {"max_steps": steps or _CPU_STEPS, "batch_size": 4, "micro_batch_size": 4}
        document["evaluation"] |= {"needle_lengths": []}  # minutes for each hundred on a CPU
        document["sharding"] = {"strategy": "ddp"}
        document["resources"] = {"num_workers": 1, "cpus_per_worker": os.cpu_count() or 1}
    return document


def save_beside(output: Path, text: str) -> Path:
    """Write the spec to `{output}.yaml`, and return that path. Raises `ConflictError` if it holds another spec."""
    path = output.with_name(f"{output.name}.yaml")
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConflictError(
            f"{path} holds another spec; use another --output, or `--file {path.name}` to run it",
            field="output",
            value=str(output),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
