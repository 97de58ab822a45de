"""`swiftkv distill`: a job on a Ray of its own, without a control plane."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from swiftkv_platform.cli.context import Json, SpecFile, read_spec
from swiftkv_platform.cli.output import err, print_json, say
from swiftkv_platform.errors import InvalidInputError, SwiftKVError, TrainingError
from swiftkv_platform.local.terminal import JobDisplay
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.specs import JobSpec


def distill(
    file: SpecFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the model goes: a new or empty directory.")
    ],
    json: Json = False,
) -> None:
    """Distil a model here and now, on a Ray of its own that ends with the command."""
    spec = read_spec(file)
    artifact = _run(spec, output.expanduser().resolve())
    evaluation = jsonlib.loads((artifact / "evaluation.json").read_text(encoding="utf-8"))
    if json:
        print_json({"output": str(artifact), **evaluation})
        return
    distilled, teacher = evaluation["distilled"], evaluation["teacher"]
    say(
        f"{artifact}: perplexity {distilled['perplexity']:.2f} (teacher {teacher['perplexity']:.2f}), "
        f"KL {distilled['kl']:.4f} nats, top-1 agreement {distilled['top1_agreement']:.1%}"
    )


def _run(spec: JobSpec, output: Path) -> Path:
    try:
        # Not before the command runs: torch and Ray take seconds to import.
        from swiftkv_platform.jobs.distill import run_local
        from swiftkv_platform.jobs.failures import explain
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"Distilling here needs {error.name}; pip install 'swiftkv-platform[train]' would do, or "
            "`swiftkv jobs submit` to a cluster that has it"
        ) from error

    configure_logging()
    try:
        with JobDisplay(err()) as display:
            return run_local(spec, output, on_event=display.show)
    except SwiftKVError:
        raise
    except Exception as error:
        failure = explain(error)
        if failure.code == SwiftKVError.code:
            # Unforeseen: the traceback is what helps.
            raise
        raise TrainingError(f"{failure.code}: {failure.message}", field=failure.field) from error
