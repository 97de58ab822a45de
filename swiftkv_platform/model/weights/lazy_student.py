"""A student whose weights are read on demand, so that no process holds the whole model.

A module is filled before it runs or is sharded, and released afterwards. In a sharded model each worker reads its own
rows.

New tensors start as copies of these teacher tensors:

    q_*, o_proj   the layer's own                 norm_swiftkv  layer l's input_layernorm
    k_*, v_*, ... the mean over the group         exit_norm, exit_head  the teacher's final norm and head

Source: paper, sections 3.1 and 3.2; with other key-value heads than the teacher's, appendix C.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.core_model_loading import revert_weight_conversion

from swiftkv_platform.model.causal_lm import get_student_classes, make_student_config
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.weights.checkpoint import Checkpoint, read_rows
from swiftkv_platform.model.weights.loading import StoredWeights, build_on_meta, check_checkpoint_fits, get_first_dtype
from swiftkv_platform.model.weights.writing import write_model_shards
from swiftkv_platform.student_shape import RequestedStudentShape

_TEACHER_PREFIX = "teacher_copy."
_ParameterSlot = tuple[int, str]
"""Identity of a module, and the name of one of its parameters."""


class LazyStudent:
    """A student on the meta device whose weights are read on demand.

    Args:
        model: the student, with its positional buffers on a real device.
        start: initial values of new tensors, or the student's own tensors, by name; others are copied from the
            teacher's.
        device: device of the values.
    """

    def __init__(
        self, model: Any, teacher: StoredWeights, start: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
    ) -> None:
        self.model = model
        self._teacher = teacher
        self._start = start
        self._device = torch.device(device)
        self._copied = {tensor.name: tensor for tensor in plan_copied_start(model)}
        self._map_parameters(model, lambda name: name)

    @classmethod
    def open(
        cls,
        path: str | Path,
        shape: RequestedStudentShape,
        start: Mapping[str, Tensor],
        *,
        revision: str | None = None,
        dtype: torch.dtype | Literal["auto"] | None = None,
        device: torch.device | str = "cpu",
    ) -> LazyStudent:
        """Make the student of the teacher at `path`, whose tensor names and shapes are checked first.

        Args:
            dtype: dtype of the student; "auto" is that of the configuration, or else of the checkpoint. None keeps the
                checkpoint's values and the configuration's dtype.

        Raises:
            ModelError: unreadable model, unknown family, or tensors that are missing or have another shape.
            InvalidInputError: l or g out of range.
        """
        teacher = read_config(path, revision=revision)
        config = make_student_config(teacher, shape)
        checkpoint = Checkpoint.open(path, revision=revision)
        quantized = check_checkpoint_fits(checkpoint, teacher, get_student_classes(teacher.model_type).teacher)
        config.tie_word_embeddings = teacher.tie_word_embeddings
        if quantized:
            del config.quantization_config  # the student's weights are dequantized
        if dtype == "auto":
            dtype = config.dtype or get_first_dtype(checkpoint)
        if dtype is not None:
            config.dtype = dtype

        def build() -> Any:
            student = get_student_classes(teacher.model_type).causal_lm(config)
            return student if dtype is None else student.to(dtype)

        model = build_on_meta(build, checkpoint, device)
        return cls(model, StoredWeights(checkpoint, teacher, dtype), start, device=device)

    @property
    def base(self) -> Checkpoint:
        return self._teacher.checkpoint

    @property
    def new_names(self) -> list[str]:
        """Names of the tensors that the student adds to its teacher's."""
        return list(self._copied)

    def read_new_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the student adds to its teacher's, each read or made on demand."""
        for name in self._copied:
            yield name, self.read(name)

    def set_start_values(self, start: Mapping[str, Tensor]) -> None:
        """Use `start` as the initial values of the tensors that the student adds to its teacher's."""
        self._start = start

    def map_parameters(self, module: nn.Module) -> None:
        """Map the parameters of a module with the student as `student` and optionally a
        `teacher_copy`, to their names in the student."""
        self._map_parameters(module, _get_student_name)

    def _map_parameters(self, root: nn.Module, student_name: Callable[[str], str]) -> None:
        self._root = root
        self._get_student_name = student_name
        self._names: dict[_ParameterSlot, str] = {}
        aliases: dict[int, list[str]] = defaultdict(list)
        for prefix, module in root.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    name = student_name(f"{prefix}.{leaf}" if prefix else leaf)
                    self._names[id(module), leaf] = name
                    aliases[id(parameter)].append(name)
        # A tied parameter has its first name. The teacher's copies are separate parameters.
        self._tied = {name: names[0] for names in aliases.values() if len(names) > 1 for name in names}
        self._filled: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def load_parameters(self, module: nn.Module, *, with_added: bool = True, read: bool = True) -> None:
        """Load every parameter of `module` that is on the meta device, in its dtype.

        Args:
            with_added: include the parameters that the student adds to its teacher's.
            read: read the values; False only allocates storage, for a worker that receives the values.
        """
        for part, leaf, parameter in _iterate_parameters(module):
            name = self._names[id(part), leaf]
            if not parameter.is_meta or (not with_added and name in self._copied):
                continue
            tied = self._tied.get(name)
            filled = None if tied is None else self._filled.get(tied)
            if filled is None:
                if read:
                    values = self.read(name).to(self._device, parameter.dtype, copy=name in self._start)
                else:
                    values = torch.empty_like(parameter, device=self._device)
                filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                if tied is not None:
                    self._filled[tied] = filled
            part._parameters[leaf] = filled

    def free_parameters(self, module: nn.Module) -> None:
        for part, leaf, parameter in _iterate_parameters(module):
            part._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            self._filled.pop(self._tied.get(self._names[id(part), leaf], ""), None)

    @torch.no_grad()
    def load_shards(self, root: nn.Module, only: Mapping[str, Any] | None = None) -> None:
        """Load every parameter of a model sharded by FSDP2; each worker reads its own rows.

        Args:
            root: the module passed to `map_parameters`, or the student.
            only: names in the student of the parameters to load; None: all.
        """
        for own_name, parameter in root.named_parameters():
            name = self._get_student_name(own_name)
            if only is not None and (name not in only or own_name.startswith(_TEACHER_PREFIX)):
                continue
            if not isinstance(parameter, DTensor):
                parameter.copy_(self.read(name))
                continue
            rows = get_local_rows(parameter)
            if rows.stop > rows.start:
                parameter.to_local().copy_(self.read(name, rows))

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor of the student, or only the given rows of it."""
        if name in self._start:
            return read_rows(self._start, name, rows)
        copied = self._copied.get(name)
        if copied is None or name in self._teacher:  # the latter if the files are a student's
            return self._teacher.read(name, rows)
        return copied.make_tensor(self._teacher.read, rows)


def get_local_rows(parameter: DTensor) -> slice:
    """Return the rows of a parameter that this worker holds; the mesh has one dimension."""
    (placement,) = parameter.placements
    if not isinstance(placement, Shard):
        return slice(0, parameter.shape[0])
    assert placement.dim == 0, "FSDP2 shards rows"
    size, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    share = -(-parameter.shape[0] // size)
    start = min(rank * share, parameter.shape[0])
    return slice(start, start + parameter.to_local().shape[0])


def _get_student_name(name: str) -> str:
    """Return the name in the student of a parameter of `DistillationModel`."""
    if name.startswith(_TEACHER_PREFIX):
        return f"model.{name.removeprefix(_TEACHER_PREFIX)}"
    return name.removeprefix("student.")


def _iterate_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in module.modules():
        for leaf, parameter in list(part._parameters.items()):
            if parameter is not None:
                yield part, leaf, parameter


def save_lazy_student(lazy: LazyStudent, directory: Path, *, teacher: bool) -> None:
    """Write a student's weight files as `save_pretrained` does, with one file's tensors in memory. `teacher`: keep the
    teacher's projections of layers >= l; False also updates the model's configuration."""
    write_model_shards(directory, read_stored_tensors(lazy, teacher=teacher))


def read_stored_tensors(lazy: LazyStudent, *, teacher: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a student's tensors by their names in weight files, each read on demand; `teacher` as for
    `save_lazy_student`."""
    model = lazy.model
    dropped = () if teacher else tuple(f"{module}." for module in model.list_teacher_modules(model.config))
    if not teacher:
        model.config.swiftkv_teacher_weights = False
    for name, parameter in model.named_parameters():  # yields a tied head once
        if not name.startswith(dropped):
            read = {name: lazy.read(name).to(parameter.dtype)}
            # Tensors fused in memory are stored separately.
            yield from revert_weight_conversion(model, read).items()


_STUDENT_SUFFIX_PATTERN = re.compile(r"(_decode)?_swiftkv")
_LAYER_TENSOR_PATTERN = re.compile(r"model\.layers\.(\d+)\.self_attn\.(\w+)\.(\w+)")


@dataclass(frozen=True)
class StartingTensor:
    """Initial value of a tensor that the teacher does not have."""

    name: str
    sources: tuple[str, ...]
    """Teacher tensors whose mean is the initial value."""
    rows: slice | None = None
    """Rows of the sources to use; None: all."""
    heads: tuple[int, int] | None = None
    """Number of key-value heads of a source and of this tensor, if they differ; rows are then heads x head_dim."""

    def make_tensor(self, read: Callable[[str, slice | None], Tensor], rows: slice | None = None) -> Tensor:
        """Return this tensor, or the given rows of it, in the dtype of its sources. The mean is computed in float32.
        `read` returns a teacher's tensor by name, or the given rows of it."""
        if self.heads is not None:  # sharing heads changes the rows
            tensor = self._average_sources([read(source, self.rows) for source in self.sources])
            return tensor if rows is None else tensor[rows]
        wanted = self.rows
        if rows is not None:
            first = 0 if self.rows is None else self.rows.start
            wanted = slice(first + rows.start, first + rows.stop)
        return self._average_sources([read(source, wanted) for source in self.sources])

    def _average_sources(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(sources) == 1 and self.heads is None:
            return sources[0]
        mean = sources[0].float()
        for source in sources[1:]:
            mean = mean + source.float()
        mean = mean / len(sources)
        if self.heads is not None:
            mean = share_heads(mean, *self.heads)
        return mean.to(sources[0].dtype)


def share_heads(tensor: torch.Tensor, num_heads: int, num_shared: int) -> torch.Tensor:
    """[num_heads * head_dim, ...] -> [num_shared * head_dim, ...].

    Fewer heads: the mean of the consecutive heads that each one replaces. More heads: repeated heads, which do not
    change the output but give training more parameters.
    """
    heads: torch.Tensor = tensor.unflatten(0, (num_heads, -1))
    if num_shared < num_heads:
        pools: torch.Tensor = heads.unflatten(0, (num_shared, -1))
        return pools.mean(1).flatten(0, 1)
    return heads.repeat_interleave(num_shared // num_heads, dim=0).flatten(0, 1)


def plan_copied_start(student: Any) -> Iterator[StartingTensor]:
    """Yield every tensor that `student`, which may be on the meta device, adds to its teacher, layer by layer."""
    config, layer_map = student.config, student.config.layer_map
    attention_class = student.decoder_class.layer_class.attention_class
    heads = None
    if config.num_key_value_heads_swiftkv not in (None, config.num_key_value_heads):
        heads = (config.num_key_value_heads, config.num_key_value_heads_swiftkv)
    for name, _ in student.named_parameters():
        match = _LAYER_TENSOR_PATTERN.fullmatch(name)
        if match is None or not _STUDENT_SUFFIX_PATTERN.search(name):
            continue
        layer, module = int(match[1]), _STUDENT_SUFFIX_PATTERN.sub("", match[2])
        shared = not module.startswith(("q_", "o_"))
        layers = layer_map.get_group(layer) if shared else (layer,)
        module, rows = attention_class.locate_teacher_rows(config, module)
        sources = tuple(f"model.layers.{i}.self_attn.{module}.{match[3]}" for i in layers)
        yield StartingTensor(name, sources, rows, heads if shared else None)
    first = layer_map.num_key_value_layers
    if first < layer_map.num_hidden_layers and config.family.has_input_norm:
        yield StartingTensor("model.norm_swiftkv.weight", (f"model.layers.{first}.input_layernorm.weight",))
    if config.shape.has_exit_head:
        yield StartingTensor("exit_norm.weight", ("model.norm.weight",))
        yield StartingTensor("exit_head.weight", ("lm_head.weight",))
