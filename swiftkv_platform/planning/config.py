"""Read `config.json` and give typed access to its keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import Fixed, Flag

FIELD = "model.name_or_path"
_MOST = 1 << 40
"""Largest count that is accepted in a configuration."""

ConfigSource = str | Path | Mapping[str, Any]
"""A `config.json`, the directory that holds one, or its content."""


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Return the content of a Hugging Face `config.json`. Raises `ModelError` if there is none, or it holds no JSON
    object."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); a config.json or a Hugging Face model directory is accepted",
            field=FIELD,
            value=str(source),
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error})", field=FIELD, value=str(source)) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, not an object", field=FIELD, value=str(source))
    return config


class Fields:
    """Typed access to a configuration. A missing or mistyped value is a `ModelError` that names the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def count(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """A positive integer of at most `most` under the first of `names` that is there; null counts as absent."""
        value = self.optional_count(*names, most=most)
        if value is None:
            value = default
        if value is None:
            raise self._unusable(names[0], None, "a positive integer is accepted")
        return value

    def optional_count(self, *names: str, least: int = 1, most: int = _MOST) -> int | None:
        """Return the integer from `least` to `most` of the first of `names` that is set; None if none is."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                kind = "a positive integer of" if least else "0 or a positive integer of"
                raise self._unusable(name, value, f"{kind} at most {most} is accepted")
            return value
        return None

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._unusable(name, value, "true and false are accepted")
        return value

    def has(self, flag: Flag | Fixed) -> bool:
        """Whether a property of the family holds here."""
        return flag.value if isinstance(flag, Fixed) else self.flag(flag.key, default=flag.default)

    def text(self, *names: str, default: str | None = None) -> str:
        for name in names:
            value = self._config.get(name, default)
            if isinstance(value, str):
                return value
        raise self._unusable(names[0], self._config.get(names[0]), "a string is accepted")

    def given(self, name: str) -> bool:
        """Whether the key is there; it may be null."""
        return name in self._config

    def sequence(self, name: str) -> Sequence[Any] | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise self._unusable(name, value, "a list is accepted")
        return value

    @staticmethod
    def _unusable(name: str, value: object, accepted: str) -> ModelError:
        return ModelError(f"config.json has {name} {value!r:.80}; {accepted}", field=name, value=value)
