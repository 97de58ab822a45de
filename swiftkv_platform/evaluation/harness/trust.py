"""Find out whether a task of the installed harness may run text as code, from the imports of its scorers.

A task file names functions and metrics of the harness. Some pass the model's output to an interpreter: with `exec`,
with sympy's parser, which calls `eval`, or with a metric that is code from the hub (`evaluate.load`). The harness marks
only some of them as unsafe. So a task is trusted if all modules of its functions import only `TRUSTED_MODULES` and do
not use `_CODE_RUNNERS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_STANDARD_MODULES = (
    "__future__ abc argparse ast collections contextlib copy csv dataclasses datetime enum functools hashlib html "
    "importlib.metadata io itertools json logging math operator os pathlib random re signal statistics string sys time "
    "types typing unicodedata uuid warnings xml.sax.saxutils"
)
_OTHER_MODULES = (
    "absl datasets emoji immutabledict langdetect nltk numpy packaging pandas regex rouge_score sacrebleu scipy "
    "sklearn tqdm transformers.data.metrics.squad_metrics typing_extensions word2number"
)
_HARNESS_MODULES = (
    "lm_eval.api.filter lm_eval.api.group lm_eval.api.instance lm_eval.api.metrics lm_eval.api.registry "
    "lm_eval.api.task lm_eval.filters lm_eval.utils"
)
TRUSTED_MODULES = frozenset(f"{_STANDARD_MODULES} {_OTHER_MODULES} {_HARNESS_MODULES}".split())
"""Modules, with their submodules, in which scorers use no function that runs text as code or downloads code."""
_CODE_RUNNERS = frozenset(
    {"eval", "exec", "compile", "__import__", "system", "popen", "import_module", "read_pickle", "hf_hub_download"}
)
"""Names that a trusted scorer does not use, on any object. (The pattern of `re.compile` is not code.)"""
_HARMLESS_CALLS = frozenset({"re.compile", "regex.compile"})
_HARNESS_TASKS_PREFIX = "lm_eval.tasks."


def find_code_risk(name: str, manager: Any) -> str | None:
    """Return why a task, group or tag of the harness may run text as code, e.g. "a/utils.py imports sympy"; None if it
    is trusted. `manager`: the harness's `TaskManager`."""
    from lm_eval.tasks._yaml_loader import load_yaml

    pending: list[str | Mapping[str, Any]] = [name]
    seen: set[str] = set()
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            config, each = each, str(each.get("task") if isinstance(each.get("task"), str) else each.get("group"))
            reason = _find_config_risk(config)
            if reason is not None:
                return reason
            members = config.get("task")
            pending += members if isinstance(members, list) else []
        entry = manager.task_index.get(each)
        if entry is not None and each not in seen:
            seen.add(each)
            if entry.yaml_path is None:  # the members of a tag
                pending += entry.tags
            else:
                pending.append(load_yaml(entry.yaml_path, resolve_func=False))
    return None


def _find_config_risk(config: Mapping[str, Any]) -> str | None:
    """Return why the configuration of a task or group, with unresolved functions, is not trusted; None if it is."""
    if config.get("unsafe_code"):
        return "the harness marks it as unsafe"
    if config.get("process_results") is None and "class" not in config:
        for metric in config.get("metric_list") or ():
            found = _find_metric_risk(metric)
            if found is not None:
                return found
    for function in _iter_functions(config):
        found = _find_function_risk(function)
        if found is not None:
            return found
    return None


def _find_metric_risk(metric: Mapping[str, Any]) -> str | None:
    """Return why a metric is not trusted: the harness downloads unknown metrics as code from the hub."""
    from lm_eval.api.registry import metric_registry

    name = str(metric.get("metric"))
    if _is_function(name) or (name in metric_registry and not metric.get("hf_evaluate")):
        return None
    return f"its metric {name!r} is downloaded as code"


def _iter_functions(value: Any) -> Iterator[str]:
    """Yield the names after `!function` in a configuration."""
    if isinstance(value, str):
        if _is_function(value):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_functions(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iter_functions(item)


@cache
def _get_tasks_directory() -> Path:
    import lm_eval.tasks

    # Resolved like the harness's files, which matters in a symlinked environment.
    return Path(lm_eval.tasks.__path__[0]).resolve()


def _is_function(value: str) -> bool:
    """Whether a text is an unresolved function: a path below the harness's tasks and a name."""
    return value.startswith(f"{_get_tasks_directory()}/") and "\n" not in value


def _find_function_risk(name: str) -> str | None:
    module = name.rpartition(".")[0]
    directory, _, path = module.rpartition("/")
    file = Path(directory, f"{path.replace('.', '/')}.py")
    return _find_file_risk(file) if file.is_file() else _find_module_risk(path, file)


@cache
def _find_file_risk(file: Path) -> str | None:
    """Return why a file of the harness is not trusted; None if it is."""
    pending, seen = [file], set[Path]()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        tree = ast.parse(each.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and _runs_code(node):
                return f"{each.relative_to(_get_tasks_directory())} uses {ast.unparse(node)}"
            for module, names in _list_imports(node):
                files = [local for name in (module, *names) if (local := _find_local_file(name, each)) is not None]
                pending += files
                if not files and (found := _find_module_risk(module, each)) is not None:
                    return found
    return None


def _find_module_risk(module: str, file: Path) -> str | None:
    parts = module.split(".")
    if any(".".join(parts[:length]) in TRUSTED_MODULES for length in range(1, len(parts) + 1)):
        return None
    return f"{file.relative_to(_get_tasks_directory())} imports {module}"


def _runs_code(node: ast.Name | ast.Attribute) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr
    return name in _CODE_RUNNERS and ast.unparse(node) not in _HARMLESS_CALLS


def _list_imports(node: ast.AST) -> list[tuple[str, list[str]]]:
    """Return the modules that a statement imports, relative ones with dots, each with names that may be submodules."""
    if isinstance(node, ast.Import):
        return [(alias.name, []) for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    module = "." * node.level + (node.module or "")
    inside = module if module.endswith(".") else f"{module}."
    return [(module, [f"{inside}{alias.name}" for alias in node.names])]


def _find_local_file(module: str, importer: Path) -> Path | None:
    """Return the task file of the harness that `importer` imports as `module`; None for other modules."""
    paths = [importer.parent / module.replace(".", "/")]
    if module.startswith("."):
        up = len(module) - len(module.lstrip("."))
        paths = [importer.parents[up - 1] / module.lstrip(".").replace(".", "/")]
    if module.startswith(_HARNESS_TASKS_PREFIX):
        paths = [_get_tasks_directory() / module.removeprefix(_HARNESS_TASKS_PREFIX).replace(".", "/")]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    return next((file for file in files if file.is_file()), None)
