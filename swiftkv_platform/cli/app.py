"""The command tree of `swiftkv`. A command's module is imported when the command runs or its help is printed, so that
`swiftkv --help` and shell completion are fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from swiftkv_platform import __version__
from swiftkv_platform.cli.output import ErrorReportingGroup

EXAMPLES: Mapping[str, str] = {
    "distill": "swiftkv distill --model meta-llama/Llama-3.2-1B --data chats.jsonl --output student",
    "evaluate": "swiftkv evaluate student --tasks builtin:ifeval --html report.html",
    "serve": "swiftkv serve student --port 8080",
    "convert": "swiftkv convert meta-llama/Llama-3.2-1B start --calibration chats.jsonl",
    "export": "swiftkv export student exported --quantize int8",
    "analyze": "swiftkv analyze meta-llama/Llama-3.2-1B --text chats.jsonl --measure",
    "plan": "swiftkv plan meta-llama/Llama-3.2-1B -l 8 -g 2 --sequence-length 32768",
    "recipes list": "swiftkv recipes list",
    "recipes copy": "swiftkv recipes copy builtin-python-5m my-job.yaml",
    "up": "swiftkv up --port 8000",
    "down": "swiftkv down",
    "status": "swiftkv status --json",
    "demo": "swiftkv demo --output report.json",
    "doctor": "swiftkv doctor",
    "jobs submit": "swiftkv jobs submit --recipe builtin-python-5m --set training.max_steps=100 --follow",
    "jobs clone": "swiftkv jobs clone my-job --set training.max_steps=200",
    "jobs validate": "swiftkv jobs validate --file my-job.yaml",
    "jobs list": "swiftkv jobs list --status running",
    "jobs recipes": "swiftkv jobs recipes",
    "jobs get": "swiftkv jobs get my-job",
    "jobs watch": "swiftkv jobs watch my-job",
    "jobs logs": "swiftkv jobs logs my-job --tail 100",
    "jobs cancel": "swiftkv jobs cancel my-job",
    "jobs pause": "swiftkv jobs pause my-job",
    "jobs resume": "swiftkv jobs resume my-job --cost-cap 50",
    "jobs delete": "swiftkv jobs delete my-job",
    "jobs schema": "swiftkv jobs schema > job.schema.json",
    "jobs events": "swiftkv jobs events my-job",
    "jobs metrics": "swiftkv jobs metrics my-job --json",
    "jobs checkpoints": "swiftkv jobs checkpoints my-job",
    "jobs artifacts": "swiftkv jobs artifacts my-job",
    "jobs download": "swiftkv jobs download my-job student",
    "jobs wandb-sync": "swiftkv jobs wandb-sync my-job --dry-run",
    "files upload": "swiftkv files upload chats.jsonl --expires-in 30",
    "files list": "swiftkv files list",
    "files show": "swiftkv files show chats.jsonl",
    "files download": "swiftkv files download chats.jsonl copy.jsonl",
    "files delete": "swiftkv files delete chats.jsonl",
    "models list": "swiftkv models list --limit 50",
    "models get": "swiftkv models get my-model",
    "models import": "swiftkv models import ./student --name my-model",
    "models create": "swiftkv models create --from-checkpoint my-job:400 --wait",
    "models publish": "swiftkv models publish my-model --to hf://my-organization/my-model",
    "models lineage": "swiftkv models lineage my-model",
    "models promote": "swiftkv models promote my-model --reason 'KL below 0.05'",
    "models rollback": "swiftkv models rollback --reason 'wrong answers'",
    "models delete": "swiftkv models delete my-model",
    "models aliases": "swiftkv models aliases --alias production",
    "compare": "swiftkv compare my-model production --rows 20",
    "deployments list": "swiftkv deployments list",
    "deployments get": "swiftkv deployments get my-model",
    "deployments update": "swiftkv deployments update my-model --set capture.share=0.1 --set max_replicas=4",
    "deployments metrics": "swiftkv deployments metrics my-model",
    "deployments rollouts": "swiftkv deployments rollouts my-model",
    "deployments rollback": "swiftkv deployments rollback my-model my-job --reason 'wrong answers'",
    "deployments delete": "swiftkv deployments delete my-model",
    "deployments schema": "swiftkv deployments schema > deployment.schema.json",
    "traffic show": "swiftkv traffic show my-model",
    "traffic rows": "swiftkv traffic rows my-model --within 1d",
    "traffic delete": "swiftkv traffic delete my-model --user user-17",
    "deploy": "swiftkv deploy my-model --max-replicas 2",
    "generate": "swiftkv generate 'Write a haiku.' --max-tokens 64",
    "keys create": "swiftkv keys create alice --scope generate --expires-in 90d",
    "keys rotate": "swiftkv keys rotate alice --overlap 7d",
    "keys list": "swiftkv keys list",
    "keys revoke": "swiftkv keys revoke alice",
    "quota": "swiftkv quota",
    "audit": "swiftkv audit --within 7d --status 403",
    "prune": "swiftkv prune --dry-run",
    "backup": "swiftkv backup ./backup",
    "restore": "swiftkv restore ./backup",
    "sweep": "swiftkv prune",
}
"""Examples by command. Names such as `my-job` stand for the caller's own."""


class _Command(NamedTuple):
    target: str
    """Module in this package and attribute: a function, or a `typer.Typer` for a group."""
    summary: str
    """First line of the command's help."""


_LOCAL_MODEL, _LOCAL_PLATFORM = "Local model commands", "Local platform commands"
_CLIENT, _OPERATOR = "Platform client commands", "Operator commands"

_COMMANDS: dict[str, dict[str, _Command]] = {
    _LOCAL_MODEL: {
        "distill": _Command("distill:distill", "Distill a model on this machine, using a temporary local Ray."),
        "evaluate": _Command("distill:evaluate", "Evaluate a student against its teacher."),
        "serve": _Command(
            "serve:serve", "Serve a model on this machine with an OpenAI-compatible API. Stop with Ctrl-C."
        ),
        "convert": _Command("convert:convert", "Convert a teacher's checkpoint to an untrained student."),
        "export": _Command(
            "convert:export",
            "Export a student for serving: without the weights that only its teacher uses, or as an adapter.",
        ),
        "analyze": _Command(
            "plan:analyze", "Measure the SimScore of each layer's input on text (paper, equation 1), and recommend l."
        ),
        "plan": _Command(
            "plan:plan", "Estimate prefill FLOPs (paper, table 1) and KV cache bytes of students and their teacher."
        ),
        "recipes": _Command("jobs:recipes_app", "List and copy the packaged example job specs."),
    },
    _LOCAL_PLATFORM: {
        "up": _Command(
            "local:up",
            "Start Ray and the control plane on this machine. Running parts are kept; stopped parts are restarted.",
        ),
        "down": _Command("local:down", "Stop all processes that `swiftkv up` started."),
        "status": _Command(
            "local:status",
            "Show the status of Ray, the control plane and Ray Serve. The exit code is 1 unless the first two are "
            "ready.",
        ),
        "demo": _Command(
            "local:demo",
            "Distill a small model, deploy it, generate text and write a report, on a temporary local platform.",
        ),
        "doctor": _Command(
            "doctor:doctor", "Diagnose this machine and its services. The exit code is 1 if a check fails."
        ),
    },
    _CLIENT: {
        "jobs": _Command("jobs:jobs_app", "Manage distillation jobs."),
        "files": _Command("files:files_app", "Manage uploaded training data (`file-...`)."),
        "models": _Command("models:models_app", "Manage distilled models and their aliases."),
        "compare": _Command(
            "models:compare",
            "Compare two models: quality, prefill compute, KV cache, job specs, and evaluation tasks row by row.",
        ),
        "deployments": _Command("deployments:deployments_app", "Manage deployments. Create one with `swiftkv deploy`."),
        "traffic": _Command("deployments:traffic_app", "Show and delete captured requests of deployments."),
        "deploy": _Command("serve:deploy", "Deploy a distilled model."),
        "generate": _Command("generate:generate", "Generate a completion with a deployed model, streamed to stdout."),
    },
    _OPERATOR: {
        "keys": _Command("access:keys_app", "Manage API keys in the file SWIFTKV_API_KEYS_FILE."),
        "quota": _Command("access:quota", "Show your tenant's quotas and current usage."),
        "audit": _Command(
            "access:audit", "List the audit trail: changes and denied requests, with caller and address."
        ),
        "prune": _Command(
            "local:prune",
            "Delete data past its retention (SWIFTKV_RETENTION_*). The control plane does this every hour.",
        ),
        "backup": _Command(
            "local:backup",
            "Back up the database and object store to a new directory. The platform can keep running.",
        ),
        "restore": _Command(
            "local:restore",
            "Restore a backup into an empty database and the object store. Stop all control planes first.",
        ),
        "sweep": _Command("local:sweep", "Deprecated: use `swiftkv prune`."),
    },
}
"""Commands by panel of `swiftkv --help`."""
_HIDDEN = ("sweep",)


class LazyCommand(TyperCommand):
    """A command or group that is imported on first use. Until then, only its name and summary are known."""

    def __init__(self, name: str, entry: _Command, panel: str) -> None:
        super().__init__(name, help=entry.summary, rich_help_panel=panel, hidden=name in _HIDDEN)
        self._entry = entry

    @cached_property
    def imported_command(self) -> Any:
        """The command or group, with the examples of `swiftkv_platform.cli.app` below its help."""
        module, _, attribute = self._entry.target.partition(":")
        target = getattr(import_module(f"swiftkv_platform.cli.{module}"), attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(self.name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name, command.hidden = self.name, self.hidden
        if isinstance(command, TyperGroup):
            command.help = self._entry.summary
        _add_examples(command, str(self.name))
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.imported_command.make_context(info_name, args, parent=parent, **extra)


def _add_examples(command: Any, path: str) -> None:
    """Add the example of each command at or below `path`, e.g. `jobs`."""
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            _add_examples(each, f"{path} {name}")
    else:
        command.epilog = f"Example: `{EXAMPLES[path]}`"


class _CommandTree(ErrorReportingGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for panel, entries in _COMMANDS.items():
            for name, entry in entries.items():
                self.add_command(LazyCommand(name, entry, panel))


def load_commands() -> TyperGroup:
    """Return the command tree with all commands imported, e.g. for the reference page."""
    tree: TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    lazy = [command for command in tree.commands.values() if isinstance(command, LazyCommand)]
    tree.commands = {command.imported_command.name: command.imported_command for command in lazy}
    return tree


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(__version__)
        raise typer.Exit


app = typer.Typer(
    cls=_CommandTree,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distill and serve SwiftKV models: long prompts at half the prefill compute.",
)


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass
