"""Find the tasks of the installed harness that never run text as code, by the imports of their scorers.

A task's file names functions and metrics of the harness. Some pass the model's output to an interpreter: by `exec`, by
sympy's parser, which is an `eval`, or by a metric that is code from the hub (`evaluate.load`). The harness marks only
some of these as unsafe. So a task is trusted if every module of its functions imports only `MODULES` and uses none of
`_RUNS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_STANDARD = (
    "__future__ abc argparse ast collections contextlib copy csv dataclasses datetime enum functools hashlib html "
    "importlib.metadata io itertools json logging math operator os pathlib random re signal statistics string sys time "
    "types typing unicodedata uuid warnings xml.sax.saxutils"
)
_OTHERS = (
    "absl datasets emoji immutabledict langdetect nltk numpy packaging pandas regex rouge_score sacrebleu scipy "
    "sklearn tqdm transformers.data.metrics.squad_metrics typing_extensions word2number"
)
_HARNESS_ITSELF = (
    "lm_eval.api.filter lm_eval.api.group lm_eval.api.instance lm_eval.api.metrics lm_eval.api.registry "
    "lm_eval.api.task lm_eval.filters lm_eval.utils"
)
MODULES = frozenset(f"{_STANDARD} {_OTHERS} {_HARNESS_ITSELF}".split())
"""Modules (and their submodules) of which scorers use nothing that runs text as code or fetches code."""
_RUNS = frozenset(
    {"eval", "exec", "compile", "__import__", "system", "popen", "import_module", "read_pickle", "hf_hub_download"}
)
"""Names that a trusted scorer does not use, on any object. The pattern of `re.compile` is not code."""
_HARMLESS = frozenset({"re.compile", "regex.compile"})
_HARNESS = "lm_eval.tasks."


def why_untrusted(name: str, manager: Any) -> str | None:
    """Return why a task, group or tag of the harness's index may run text as code, such as "a/utils.py imports sympy";
    None if it does not. `manager`: the harness's `TaskManager`."""
    from lm_eval.tasks._yaml_loader import load_yaml

    pending: list[str | Mapping[str, Any]] = [name]
    seen: set[str] = set()
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            config, each = each, str(each.get("task") if isinstance(each.get("task"), str) else each.get("group"))
            found = _why_config(config)
            if found is not None:
                return found
            members = config.get("task")
            pending += members if isinstance(members, list) else []
        entry = manager.task_index.get(each)
        if entry is not None and each not in seen:
            seen.add(each)
            if entry.yaml_path is None:  # for a tag these are its members, for a task the tags it has
                pending += entry.tags
            else:
                pending.append(load_yaml(entry.yaml_path, resolve_func=False))
    return None


def _why_config(config: Mapping[str, Any]) -> str | None:
    """Return why not to trust the configuration of a task or group with unresolved functions; None if trusted."""
    if config.get("unsafe_code"):
        return "the harness marks it as unsafe"
    if config.get("process_results") is None and "class" not in config:
        for metric in config.get("metric_list") or ():
            found = _why_metric(metric)
            if found is not None:
                return found
    for function in _functions(config):
        found = _why_function(function)
        if found is not None:
            return found
    return None


def _why_metric(metric: Mapping[str, Any]) -> str | None:
    """Return why not to trust a metric: the harness fetches code from the hub for those it does not have."""
    from lm_eval.api.registry import metric_registry

    name = str(metric.get("metric"))
    if _is_function(name) or (name in metric_registry and not metric.get("hf_evaluate")):
        return None
    return f"its metric {name!r} is downloaded as code"


def _functions(value: Any) -> Iterator[str]:
    """Yield the names after `!function` anywhere in a configuration."""
    if isinstance(value, str):
        if _is_function(value):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _functions(item)
    elif isinstance(value, list):
        for item in value:
            yield from _functions(item)


@cache
def _root() -> Path:
    import lm_eval.tasks

    # Resolved as the harness resolves its files: behind a linked environment, nothing would look like a function else.
    return Path(lm_eval.tasks.__path__[0]).resolve()


def _is_function(value: str) -> bool:
    """Whether a text is an unresolved function: a path below the harness's tasks, without suffix, and a name."""
    return value.startswith(f"{_root()}/") and "\n" not in value


def _why_function(name: str) -> str | None:
    module = name.rpartition(".")[0]
    directory, _, path = module.rpartition("/")
    file = Path(directory, f"{path.replace('.', '/')}.py")
    return _why_file(file) if file.is_file() else _why_module(path, file)


@cache
def _why_file(file: Path) -> str | None:
    """Return why not to trust a file of the harness; None if trusted."""
    pending, seen = [file], set[Path]()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        tree = ast.parse(each.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and _runs(node):
                return f"{each.relative_to(_root())} uses {ast.unparse(node)}"
            for module, names in _imported(node):
                files = [local for name in (module, *names) if (local := _local(name, each)) is not None]
                pending += files
                if not files and (found := _why_module(module, each)) is not None:
                    return found
    return None


def _why_module(module: str, file: Path) -> str | None:
    parts = module.split(".")
    if any(".".join(parts[:length]) in MODULES for length in range(1, len(parts) + 1)):
        return None
    return f"{file.relative_to(_root())} imports {module}"


def _runs(node: ast.Name | ast.Attribute) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr
    return name in _RUNS and ast.unparse(node) not in _HARMLESS


def _imported(node: ast.AST) -> list[tuple[str, list[str]]]:
    """Return the modules that a statement imports, relative ones with their dots, and for each the names that may be
    submodules."""
    if isinstance(node, ast.Import):
        return [(alias.name, []) for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = "." * node.level + (node.module or "")
    inside = module if module.endswith(".") else f"{module}."
    return [(module, [f"{inside}{alias.name}" for alias in node.names])]


def _local(module: str, importer: Path) -> Path | None:
    """Return the file of the harness's tasks for `module`, as `importer` names it; None for other modules."""
    places = [importer.parent / module.replace(".", "/")]
    if module.startswith("."):
        up = len(module) - len(module.lstrip("."))
        places = [importer.parents[up - 1] / module.lstrip(".").replace(".", "/")]
    if module.startswith(_HARNESS):
        places = [_root() / module.removeprefix(_HARNESS).replace(".", "/")]
    found = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    return next((file for file in found if file.is_file()), None)
