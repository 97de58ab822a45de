"""A student without weights, and where each module's come from: with sharded parameters no worker holds it whole.

It knows names and files, no strategy: a module is filled before it is sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.model.checkpoint import Checkpoint
from swiftkv_platform.model.conversion import make_student_config, read_config
from swiftkv_platform.model.families import student_classes
from swiftkv_platform.model.fp8 import is_fp8
from swiftkv_platform.model.initialization import copied_start

_KEPT = "kept_teacher."


class LazyStudent:
    """A student on the meta device whose weights are read when they are asked for.

    Args:
        model: the student, its positional buffers in place.
        start: where new tensors start, by name; what it lacks is copied from the teacher's.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, start: Mapping[str, Tensor]) -> None:
        self.model = model
        self._checkpoint = checkpoint
        self._start = start
        self._copied = {tensor.name: tensor for tensor in copied_start(model)}
        self._names: dict[int, str] = {}
        self._tied: dict[str, nn.Parameter] = {}

    @classmethod
    def open(
        cls, path: str | Path, start: Mapping[str, Tensor], *, revision: str | None = None, **shape: Any
    ) -> LazyStudent | None:
        """The student of the teacher at `path`; None where that stores its tensors under other names or in another form
        (experts one by one, FP8), which transformers has to load whole.

        Args:
            shape: what `make_student_config` takes.
        """
        teacher = read_config(path, revision)
        if is_fp8(teacher):
            return None
        with torch.device("meta"):
            model = student_classes(teacher.model_type).causal_lm(make_student_config(teacher, **shape))
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
        lazy = cls(model.eval(), Checkpoint.open(path, revision=revision), start)
        named = dict(model.named_parameters())
        complete = lazy._sources(named) <= lazy._checkpoint.shards.keys()
        return lazy if complete and not any(buffer.is_meta for buffer in model.buffers()) else None

    def attach(self, fork: Fork) -> None:
        """Learn which parameter of the fork is which: it has others than the student had, and more."""
        count: dict[int, int] = defaultdict(int)
        for name, parameter in fork.named_parameters(remove_duplicate=False):
            prefix = "model." if name.startswith(_KEPT) else ""
            self._names.setdefault(id(parameter), prefix + name.removeprefix(_KEPT).removeprefix("student."))
            count[id(parameter)] += 1
        # Kept alive, so that no other object gets their identity.
        self._fork_parameters = list(fork.parameters())
        self._is_tied = {key for key, number in count.items() if number > 1}

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give every parameter of `module` that is on the meta device its values, in the dtype it has."""
        empty = {
            (part, leaf): parameter
            for part in module.modules()
            for leaf, parameter in part._parameters.items()
            if parameter is not None and parameter.is_meta
        }
        names = {self._names[id(parameter)] for parameter in empty.values()}
        read = self._checkpoint.tensors(self._sources(names))
        for (part, leaf), parameter in empty.items():
            name = self._names[id(parameter)]
            filled = self._tied.get(name)
            if filled is None:
                values = self._value(name, read).to(parameter.dtype).clone()
                filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                if id(parameter) in self._is_tied:
                    self._tied[name] = filled
            part._parameters[leaf] = filled

    def _sources(self, names: Any) -> set[str]:
        """Tensors of the checkpoint that `names` are made from."""
        sources: set[str] = set()
        for name in names:
            if name not in self._start:
                copied = self._copied.get(name)
                sources.update(self._stored(source) for source in (copied.sources if copied else (name,)))
        return sources

    def _stored(self, name: str) -> str:
        """A tied head is stored once."""
        tied = name == "lm_head.weight" and self.model.config.tie_word_embeddings
        return "model.embed_tokens.weight" if tied else name

    def _value(self, name: str, read: Mapping[str, Tensor]) -> Tensor:
        if name in self._start:
            return self._start[name]
        copied = self._copied.get(name)
        if copied is None:
            return read[self._stored(name)]
        return copied.of([read[self._stored(source)] for source in copied.sources])
