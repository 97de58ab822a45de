"""Rooms of the control plane import from each other only the modules that a room lists in `__all__`."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from swiftkv_platform import control_plane

HOUSE = Path(control_plane.__file__).parent
NAME = control_plane.__name__
ROOMS = sorted(path.parent.name for path in HOUSE.glob("*/__init__.py"))


def imports(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; for `from a import b`, `a.b`."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def meetings() -> Iterator[tuple[str, str, str]]:
    """Yield (file, imported room, imported module) of each import from one room into another."""
    for file in HOUSE.rglob("*.py"):
        room = file.relative_to(HOUSE).parts[0]
        if room not in ROOMS:
            continue
        for name in imports(file):
            if name.startswith(f"{NAME}."):
                met, *rest = name.removeprefix(f"{NAME}.").split(".")
                if met in ROOMS and met != room:
                    yield str(file.relative_to(HOUSE)), met, rest[0]


def test_rooms_meet_through_the_modules_that_they_name() -> None:
    named = {room: import_module(f"{NAME}.{room}").__all__ for room in ROOMS}
    assert [meeting for meeting in meetings() if meeting[2] not in named[meeting[1]]] == []


def test_no_room_names_a_module_that_nobody_meets() -> None:
    """A room's `__all__` lists exactly the modules that other rooms import."""
    named = {(room, module) for room in ROOMS for module in import_module(f"{NAME}.{room}").__all__}
    assert named == {(room, module) for _, room, module in meetings()}


def test_migrations_import_nothing_of_this_project() -> None:
    """An old migration must keep doing the same to rows when rules and specs change."""
    files = sorted((HOUSE / "database" / "migrations" / "versions").glob("*.py"))
    found = [(file.name, name) for file in files for name in imports(file) if name.startswith("swiftkv_platform")]
    assert files
    assert found == []
