"""Placement on Ray's nodes: whether bundles of resources, each on one node, fit at the same time. Knows no Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

Bundle = Mapping[str, float]
"""Resources that must be on one node, by Ray's names."""
_RESOURCE_PRECISION = 1e-4
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class Node:
    """A node's resources by Ray's names: `CPU`, `GPU`, `memory` (bytes), `accelerator_type:H100`."""

    total: Bundle
    free: Bundle
    """Resources not held by tasks, actors and placement groups."""


def normalize_resource_name(name: str) -> str:
    """Normalize the name of a resource: Ray's dashboard changes capitals and underscores."""
    return name if name in ("CPU", "GPU", "memory") else name.lower().replace("_", "")


def can_place(nodes: Iterable[Bundle], bundles: Sequence[Bundle]) -> bool:
    """Whether all bundles fit on the nodes at the same time."""
    return reserve([normalize_resources(node) for node in nodes], bundles)


class EmptyNodes:
    """Empty nodes, optimized for many queries: of nodes with equal resources, only as many are tried as there are
    bundles."""

    def __init__(self, totals: Iterable[Bundle]) -> None:
        self._nodes = [normalize_resources(total) for total in totals]
        self._groups: dict[tuple[str, ...], dict[tuple[float, ...], list[int]]] = {}
        """Indices of nodes by amounts, by the names of the resources."""

    def can_place(self, bundles: Sequence[Bundle]) -> bool:
        """Whether all bundles fit on the nodes at the same time, as `can_place` above decides."""
        names = tuple(sorted({"GPU", "CPU"}.union(*({n for n, amount in each.items() if amount} for each in bundles))))
        if names not in self._groups:
            alike = self._groups[names] = {}
            for index, node in enumerate(self._nodes):
                alike.setdefault(tuple([node.get(name, 0.0) for name in names]), []).append(index)
        chosen = sorted(index for indices in self._groups[names].values() for index in indices[: len(bundles)])
        return reserve([dict(self._nodes[index]) for index in chosen], bundles)


def compute_max_deployment_resources(total: float, share: float) -> float:
    """Return the max amount of a cluster's resource for replicas: a share rounded up, so that one replica fits."""
    return min(math.ceil(total * share), total)


def normalize_resources(resources: Bundle) -> dict[str, float]:
    """Return a copy of a node's resources by normalized names, which `reserve` may change."""
    return {normalize_resource_name(name): amount for name, amount in resources.items()}


def reserve(nodes: list[dict[str, float]], bundles: Sequence[Bundle]) -> bool:
    """Reserve resources for all bundles. The first bundle may differ from the others, which are equal. Returns
    False, and reserves nothing, if they do not fit at the same time."""
    if _reserve_in_order(nodes, bundles):
        return True
    first, others = bundles[:1], bundles[1:]
    if not others or first[0] == others[0] or not _reserve_in_order([dict(node) for node in nodes], others):
        return False
    for node in nodes:  # the others may fit if the first one takes another node
        if _reserve_in_order([node], first):
            if _reserve_in_order(nodes, others):
                return True
            _add_resources(node, first[0])
    return False


def _reserve_in_order(nodes: list[dict[str, float]], bundles: Sequence[Bundle]) -> bool:
    """Reserve each bundle on the fitting node with the fewest GPUs, then CPUs. Returns False, and reserves nothing,
    if one does not fit."""
    # per run of equal bundles: fitting nodes, fewest GPUs first; on failure, release what was reserved
    taken: list[tuple[dict[str, float], Bundle]] = []
    for _, alike in groupby(bundles, key=id):
        first, *others = alike
        requested = {name: amount for name, amount in first.items() if amount}
        holding = [node for node in nodes if _has_capacity(node, requested)]
        # A node that was taken from still has fewer than those behind it.
        fewest_first = iter(sorted(holding, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0))))
        node = next(fewest_first, None)
        for _ in (first, *others):
            while node is not None and not _has_capacity(node, requested):
                node = next(fewest_first, None)
            if node is None:
                for where, what in taken:
                    _add_resources(where, what)
                return False
            _add_resources(node, requested, sign=-1)
            taken.append((node, requested))
    return True


def _add_resources(node: dict[str, float], bundle: Bundle, sign: int = 1) -> None:
    for name, amount in bundle.items():
        node[name] = node.get(name, 0.0) + sign * amount


def _has_capacity(node: Bundle, requested: Bundle) -> bool:
    return all(node.get(name, 0.0) + _RESOURCE_PRECISION >= amount for name, amount in requested.items())
