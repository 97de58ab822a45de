"""Read YAML and JSON written by people. A duplicate key is refused; other readers keep the last one."""

from __future__ import annotations

from typing import Any

import yaml


class DuplicateKeyError(yaml.YAMLError):
    """A mapping that has a key twice."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before the mapping is constructed: `<<` would then have merged its keys with the mapping's own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            before = seen.setdefault((key.tag, key.value), key.start_mark)
            if before is not key.start_mark:
                places = f"in line {before.line + 1} and in line {key.start_mark.line + 1}"
                raise DuplicateKeyError(f"the key {key.value!r} is given twice, {places}; give it once")
        return node


def load_yaml(text: str | bytes) -> Any:
    """Parse YAML or JSON. Raises `DuplicateKeyError`, which names both lines, for a duplicate key, and other
    `yaml.YAMLError`s for invalid YAML, an impossible date, or too deep nesting."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("its lists and mappings are nested too deeply") from error
    except ValueError as error:  # from constructors: 2026-13-01 is read as a date
        raise yaml.YAMLError(f"a value cannot be read as the type it looks like ({error}); quote it") from error
    finally:
        loader.dispose()
