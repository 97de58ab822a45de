"""YAML and JSON that people write: a key that is given twice is refused, where other readers keep the last one."""

from __future__ import annotations

from typing import Any

import yaml


class DuplicateKeyError(yaml.YAMLError):
    """A mapping that has a key twice."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, and not where the mapping is made: until then `<<` has written its keys beside the mapping's own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            before = seen.setdefault((key.tag, key.value), key.start_mark)
            if before is not key.start_mark:
                places = f"in line {before.line + 1} and in line {key.start_mark.line + 1}"
                raise DuplicateKeyError(f"the key {key.value!r} is given twice, {places}; give it once")
        return node


def load_yaml(text: str | bytes) -> Any:
    """The value that YAML or JSON says. Raises `yaml.YAMLError`: `DuplicateKeyError` for a key given twice, with both
    lines; others for what is no YAML, for a date that no calendar has, and for what is nested too deeply."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("its lists and mappings are nested too deeply") from error
    except ValueError as error:  # of the constructors: 2026-13-01 reads as a date
        raise yaml.YAMLError(f"a value cannot be read as what it looks like ({error}); quote it") from error
    finally:
        loader.dispose()
