"""Licence of a model as its own files name it. Reads small files of a directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---", re.DOTALL)
_LONGEST = 1 << 20
_LONGEST_NAME = 100


def licence_of(directory: Path) -> str | None:
    """The licence that the card or the configuration in `directory` names, None where neither does."""
    for document in (_card(directory / "README.md"), _json(directory / "config.json")):
        for key in ("license_name", "license"):
            named = document.get(key)
            if isinstance(named, str) and named.strip() and named != "other":
                return " ".join(named.split())[:_LONGEST_NAME]
    return None


def _card(path: Path) -> dict[str, Any]:
    match = _FRONT_MATTER.match(_text(path))
    if match is None:
        return {}
    try:
        document = yaml.safe_load(match[1])
    except yaml.YAMLError:  # what is no card names no licence
        return {}
    return document if isinstance(document, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _text(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > _LONGEST:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")
