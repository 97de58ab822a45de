"""`swiftkv plan --dry-run`: memory and collectives of a recipe's workers, from a run of it over fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.cli.context import read_spec
from swiftkv_platform.cli.output import print_json, print_table, say
from swiftkv_platform.cli.sources import model_config
from swiftkv_platform.errors import InvalidInputError

if TYPE_CHECKING:
    from swiftkv_platform.jobs.dry_run import DryRun, Memory

_GIB = 1 << 30
_COLUMNS = ("GiB of a worker at the peak", "peak", "parameters", "gradients", "optimizer", "the rest")
_LEFT_OUT = "Workspaces of kernels and what an allocator keeps come on top."


def print_dry_run(recipe: str, config: str | None, *, json: bool) -> None:
    """Run a recipe dry and print what came of it.

    Raises:
        InvalidInputError: a spec that is refused, DeepSpeed, or an installation without torch.
        ModelError: the teacher's configuration cannot be read.
    """
    spec = read_spec(Path(recipe))
    values = model_config(config or spec.model.name_or_path)
    try:
        from swiftkv_platform.jobs.dry_run import dry_run
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"a dry run needs {error.name}, which is not installed; pip install 'swiftkv-platform[train]' would do",
            field="dry-run",
            value=recipe,
        ) from error
    found = dry_run(spec, values)
    if json:
        print_json(found)
        return
    _print(found)


def _print(found: DryRun) -> None:
    say(
        f"{found.num_workers} workers, {found.num_parameters:,} parameters, of which {found.num_trained_parameters:,} "
        "are trained"
    )
    phases = {"calibrate, one worker": found.calibrate, "train": found.train, "evaluate, one worker": found.evaluate}
    print_table(_COLUMNS, [(name, *_row(memory)) for name, memory in phases.items() if memory is not None], empty="")
    calls = [(each.name, each.calls, _gib(each.num_bytes)) for each in found.collectives]
    print_table(("collectives of a step", "calls", "GiB"), calls, empty="No collectives.")
    say(_LEFT_OUT)


def _row(memory: Memory) -> list[str]:
    parts = (memory.peak, memory.parameters, memory.gradients, memory.optimizer, memory.passing + memory.remembered)
    return [_gib(part) for part in parts]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3f}"
