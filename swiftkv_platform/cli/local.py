"""`swiftkv up`, `down`, `status` and `demo`: the platform on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.output import err, out, print_json, print_table, say
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.stack import Stack, StackOptions


def up(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of the control plane; 0 takes any free one.")
    ] = None,
    num_cpus: Annotated[int | None, typer.Option(min=1, help="CPUs Ray hands out. Default: all, at least 4.")] = None,
    object_store_mib: Annotated[int, typer.Option(min=80, help="Shared memory of Ray's object store, MiB.")] = 200,
    json: Json = False,
) -> None:
    """Start Ray and the control plane on this machine; what runs already is left alone, what has died is restarted."""
    stack = Stack(settings())
    options = StackOptions(port=port, num_cpus=num_cpus, object_store_memory=object_store_mib << 20)
    console = err()
    with console.status("Starting") as spinner:

        def report(line: str) -> None:
            spinner.update(line)
            console.print(escape(line), highlight=False, soft_wrap=True)

        state = stack.up(options, report)
    if json:
        print_json(state)
    else:
        say(f"Ready at {state.url} (home {stack.home})")


def down(json: Json = False) -> None:
    """Stop what `swiftkv up` started, its children included, and nothing else on the machine."""
    with err().status("Stopping"):
        count = Stack(settings()).down()
    if json:
        print_json({"stopped_processes": count})
    else:
        say(f"Stopped {count} processes." if count else "Nothing was running.")


def status(json: Json = False) -> None:
    """Show what runs. The exit code is not 0 unless Ray and the control plane are ready."""
    parts = Stack(settings()).status()
    if json:
        print_json({"parts": [vars(part) for part in parts]})
    else:
        rows = [(part.name, part.state, part.pid, part.address, part.detail) for part in parts]
        print_table(("part", "state", "pid", "address", "detail"), rows, empty="")
    if any(part.state in ("stopped", "not ready") for part in parts):
        raise typer.Exit(1)


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Teacher in place of the built-in one: hub id, directory, or smollm2 (a real LLM, an hour)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where the report goes. Default: demo-report.json; demo-llm-report.json.", dir_okay=False),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="Its own directory for databases, store and logs. Default: .demo; .demo-llm, where a run "
            "that was cut off goes on."
        ),
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="With smollm2: minutes, too few steps to learn from.")] = False,
    keep_running: Annotated[bool, typer.Option("--keep-running", help="Leave everything up at the end.")] = False,
    json: Json = False,
) -> None:
    """Distil a small model, serve it, ask it, and report, on a stack of its own that is stopped again."""
    from swiftkv_platform.local.demo.llm import NAMES, run_llm_demo
    from swiftkv_platform.local.demo.run import DemoOptions, run_demo

    is_llm = model in NAMES
    if short and not is_llm:
        raise InvalidInputError(f"--short goes with --model {NAMES[0]} alone; leave it out", field="short", value=True)
    name = "demo-llm" if is_llm else "demo"
    options = DemoOptions(
        output=(output or Path(f"{name}-report.json")).resolve(),
        home=home or Path(f".{name}"),
        model=model,
        keep_running=keep_running,
    )
    console = err() if json else out()
    report = run_llm_demo(options, console, short=short) if is_llm else run_demo(options, console)
    if json:
        print_json(report)
