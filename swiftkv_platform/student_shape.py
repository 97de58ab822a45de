"""A student's shape: which layers compute their own K and V, which share them, and which layers prompts run through.

`RequestedStudentShape` has the arguments of `convert` and the `swiftkv` section of a job spec. For a given teacher it
resolves to a `StudentShape`, whose keys `config.json` and `swiftkv_adapter.json` store. A `LayerMap` applies a shape
to a model: what each layer computes, caches and reads.

The module imports neither torch nor transformers. Configuration classes, the vLLM plugin, plans and job specs share it.

Source: paper, section 3.1 (SingleInputKV) and 3.2 (AcrossKV).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast, get_args

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.frozen import FrozenBaseModel

Sharing = Literal["gqa", "mqa", "mha"]
"""Heads that layers >= l cache: the teacher's key-value heads, one, or one per query head (paper, appendix C)."""

DecodeKeyValue = Literal["shared", "own"]
"""Source of K and V for *deep* tokens, which run through layers >= l: `shared` takes them from x, as for prompts (the
paper's form), `own` from the token's hidden state in the first layer of each group."""

Lengths = TypeVar("Lengths")
"""One length, or a NumPy array or a tensor of lengths."""

MAX_DEEP_TAIL = 1 << 20
"""Max value of `deep_tail`."""
MAX_LIST_LENGTH = 2000
"""Max characters of a list of layers such as `0-2,4,6-16`."""
_RANGES_PATTERN = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_MAX_INDEX_DIGITS = 5
_GROUP_TENSOR_PATTERN = re.compile(r"self_attn\.([kv]_proj_swiftkv|k_norm)\.")


class StudentShape(FrozenBaseModel):
    """Keys of a student's `config.json` that its teacher's lacks, except those that an export sets. The reference
    implementation has the first three too."""

    num_key_value_layers: int
    """l: number of layers that compute their own KV."""
    key_value_group_size: int
    """g: number of consecutive layers >= l that share one KV-cache layer."""
    num_key_value_heads_swiftkv: int | None = None
    """Key-value heads of layers >= l; None: the teacher's (paper, appendix C)."""
    early_exit: bool = False
    """Whether the checkpoint has `exit_norm` and `exit_head`."""
    own_output_projection: bool = False
    """Whether layers >= l have their own output projection, `o_proj_swiftkv`."""
    swiftkv_decode_key_value: str = "shared"
    """A `DecodeKeyValue`."""
    swiftkv_prefill_layers: tuple[int, ...] | None = None
    """Layers that skipped prompt tokens run through, ascending; the last is l - 1. None: all layers < l."""
    swiftkv_deep_tail: int = 1
    """m: number of tokens at a prompt's end that are deep."""

    @classmethod
    def from_config(cls, config: Any) -> StudentShape:
        """Read the shape from a configuration object or the keys of a `config.json`; a teacher's is dense. Raises
        `InvalidInputError` for an invalid l, g or list of layers."""
        found: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
        given = {name: found[name] for name in cls.model_fields if found.get(name) is not None}
        depth = found.get("num_hidden_layers")
        if "swiftkv_prefill_layers" in given:
            _check_layer_list(given["swiftkv_prefill_layers"])
            depth = given["swiftkv_prefill_layers"][-1] + 1
        given = {"num_key_value_layers": depth, "key_value_group_size": 1} | given
        for name in ("num_key_value_layers", "key_value_group_size"):
            _check_integer(name, given[name])
        _check_deep_tail(
            given.get("swiftkv_deep_tail", 1), has_own_decode_kv=given.get("swiftkv_decode_key_value") == "own"
        )
        return cls(**given)

    @classmethod
    def dense(cls, num_hidden_layers: int) -> StudentShape:
        """Return the teacher's shape: every layer computes its own KV."""
        return cls(num_key_value_layers=num_hidden_layers, key_value_group_size=1)

    @property
    def has_exit_head(self) -> bool:
        return self.early_exit

    @property
    def has_bypassed_layers(self) -> bool:
        """Whether skipped prompt tokens bypass layers below l."""
        return bool(find_bypassed_layers(self.swiftkv_prefill_layers or ()))

    def with_shared_decode_kv(self) -> StudentShape:
        """Return the shape whose deep tokens share the prompts' K and V."""
        return self.model_copy(update={"swiftkv_decode_key_value": "shared", "swiftkv_deep_tail": 1})

    def to_config(self) -> dict[str, Any]:
        """Return the keys and values of `config.json`."""
        return self.model_dump(mode="json")

    @classmethod
    def get_config_fields(cls) -> dict[str, tuple[Any, Any]]:
        """Return the type and default of each key in `config.json`. A configuration without l is dense."""
        own = {name: (field.annotation, field.default) for name, field in cls.model_fields.items()}
        layers = {"num_key_value_layers": (int | None, None), "swiftkv_prefill_layers": (list[int] | None, None)}
        return {**own, **layers, "key_value_group_size": (int, 1)}

    def check_family_support(self, model_type: str, *, caches_latents: bool) -> None:
        """Raise `ModelError` for an unknown `swiftkv_decode_key_value`, or for bypassed layers that are not supported.

        `caches_latents`: whether the family has multi-head latent attention.
        """
        form, listed = self.swiftkv_decode_key_value, self.swiftkv_prefill_layers
        if form not in get_args(DecodeKeyValue):
            raise ModelError(
                f"swiftkv_decode_key_value is {form!r}; shared and own are accepted",
                field="swiftkv.decode_key_value",
                value=form,
            )
        if listed is None or not self.has_bypassed_layers:
            return
        if caches_latents:
            refuse_bypass_with_latents(listed, model_type)
        if form != "own":
            raise ModelError.for_field(
                "swiftkv.prefill_layers",
                list(listed),
                ", which is only for students whose generated tokens have their own K and V; use "
                "swiftkv.decode_key_value: own",
            )


STUDENT_KEYS = ("swiftkv", *StudentShape.model_fields, "swiftkv_teacher_weights", "swiftkv_prefill_only")
"""All keys of a student's `config.json` that its teacher's lacks (`configs.SwiftKVConfigMixin`)."""


@dataclass(frozen=True)
class LayerMap:
    """A student's shape in a model of L layers: which layers compute KV, and which KV-cache layer each layer reads.

    Each layer below l has its own cache layer. Layers >= l form groups of g consecutive layers (the last group may be
    shorter). A group shares one cache layer; its projections belong to the group's first layer, the leader. Raises
    `InvalidInputError` if l, g or the list of layers does not fit the model.
    """

    num_hidden_layers: int
    shape: StudentShape

    def __post_init__(self) -> None:
        if self.shape.swiftkv_prefill_layers is not None:
            _check_layer_list(self.shape.swiftkv_prefill_layers, self.num_hidden_layers)
            if self.shape.swiftkv_prefill_layers[-1] + 1 != self.num_key_value_layers:
                raise _make_conflicting_depth_error(self.shape.swiftkv_prefill_layers)
        if not 1 <= self.num_key_value_layers <= self.num_hidden_layers:
            raise InvalidInputError.for_field(
                "swiftkv.num_key_value_layers",
                self.num_key_value_layers,
                f"; with {self.num_hidden_layers} layers, 1..{self.num_hidden_layers - 1} are accepted, and "
                f"{self.num_hidden_layers} for a dense model",
            )
        skipped = max(self.num_hidden_layers - self.num_key_value_layers, 1)
        if not 1 <= self.key_value_group_size <= skipped:
            raise InvalidInputError.for_field(
                "swiftkv.key_value_group_size",
                self.key_value_group_size,
                f"; with {skipped} layers that do not compute their own KV, 1..{skipped} are accepted",
            )

    @classmethod
    def dense(cls, num_hidden_layers: int) -> LayerMap:
        """Return a teacher's map."""
        return cls(num_hidden_layers, StudentShape.dense(num_hidden_layers))

    @property
    def num_key_value_layers(self) -> int:
        return self.shape.num_key_value_layers

    @property
    def key_value_group_size(self) -> int:
        return self.shape.key_value_group_size

    @property
    def deep_tail(self) -> int | None:
        """m: number of tokens at a prompt's end with their own K and V; None if deep tokens share the prompts'.

        The prompt's length alone decides which tokens are deep (`find_deep_start`), so outputs do not depend
        on batches, chunks or cached prefixes.
        """
        return self.shape.swiftkv_deep_tail if self.deep_leaders else None

    @property
    def prefill_layers(self) -> tuple[int, ...]:
        """The layers that skipped prompt tokens run through."""
        return self.shape.swiftkv_prefill_layers or tuple(range(self.num_key_value_layers))

    @property
    def bypassed_layers(self) -> tuple[int, ...]:
        """Layers below l that compute only K and V for skipped prompt tokens."""
        return find_bypassed_layers(self.prefill_layers)

    @property
    def first_bypassed_layer(self) -> int:
        """First layer that skipped prompt tokens bypass: at most l."""
        return min(self.bypassed_layers, default=self.num_key_value_layers)

    def without_bypassed_layers(self) -> LayerMap:
        """Return the map of the same shape without bypassed layers below l."""
        return LayerMap(self.num_hidden_layers, self.shape.model_copy(update={"swiftkv_prefill_layers": None}))

    @property
    def num_kv_cache_layers(self) -> int:
        """l + ceil((L - l) / g)."""
        return self.num_key_value_layers + len(self.leaders)

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(range(self.num_key_value_layers, self.num_hidden_layers, self.key_value_group_size))

    @property
    def deep_leaders(self) -> tuple[int, ...]:
        """Leaders with their own projections for deep tokens, `{k,v}_proj_decode_swiftkv`: all leaders or none."""
        return self.leaders if self.shape.swiftkv_decode_key_value == "own" else ()

    def get_leader(self, layer: int) -> int:
        """Return the first layer of the group of `layer` >= l, which has its KV projections."""
        offset = layer - self.num_key_value_layers
        return layer - offset % self.key_value_group_size

    def is_prefill_tensor(self, name: str) -> bool:
        """Whether prefill of skipped prompt tokens reads a checkpoint's tensor: the embedding, layers < l, and the
        groups' KV projections."""
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            return name.startswith(("model.embed_tokens.", "model.norm_swiftkv."))
        layer = int(found[1])
        in_group = layer in self.leaders and _GROUP_TENSOR_PATTERN.match(found[2]) is not None
        return layer < self.num_key_value_layers or in_group

    def get_group(self, leader: int) -> range:
        return range(leader, min(leader + self.key_value_group_size, self.num_hidden_layers))

    def get_cache_layer(self, layer: int) -> int:
        """Return the index of the KV-cache layer that `layer` reads."""
        if layer < self.num_key_value_layers:
            return layer
        return self.num_key_value_layers + (layer - self.num_key_value_layers) // self.key_value_group_size


@dataclass(frozen=True, kw_only=True)
class RequestedStudentShape:
    """Requested shape of a student, independent of the teacher. `convert` describes the fields."""

    num_key_value_layers: int | None = None
    prefill_reduction: float | None = None
    key_value_group_size: int = 1
    early_exit: bool = False
    sharing: Sharing = "gqa"
    own_output_projection: bool = False
    decode_key_value: DecodeKeyValue = "shared"
    prefill_layers: Sequence[int] | None = None
    deep_tail: int = 1

    @classmethod
    def from_spec(cls, section: Any) -> RequestedStudentShape:
        """Read the request from an object with the same fields, such as a job spec's `swiftkv` section."""
        return cls(**{field.name: getattr(section, field.name) for field in fields(cls)})

    @property
    def requested_depth(self) -> int | None:
        """l as set directly or by `prefill_layers`; None if neither is set."""
        return self.prefill_layers[-1] + 1 if self.prefill_layers else self.num_key_value_layers

    @property
    def has_own_decode_kv(self) -> bool:
        """Whether deep tokens have their own K and V."""
        return self.decode_key_value == "own"

    @property
    def has_bypassed_layers(self) -> bool:
        """Whether prompts bypass layers below l."""
        return bool(find_bypassed_layers(self.prefill_layers or ()))

    def resolve_depth(self, num_hidden_layers: int) -> int:
        """Return l from `num_key_value_layers`, `prefill_layers` or `prefill_reduction`; half of the layers without
        them. Raises `InvalidInputError` for conflicting values or a reduction outside 0..1."""
        share = self.prefill_reduction
        if self.prefill_layers is not None:
            _check_layer_list(self.prefill_layers, num_hidden_layers)
            if share is not None or self.num_key_value_layers not in (None, self.requested_depth):
                raise _make_conflicting_depth_error(self.prefill_layers)
        given = self.requested_depth
        if given is not None and share is not None:
            raise InvalidInputError(
                f"swiftkv.num_key_value_layers is {given} and swiftkv.prefill_reduction is {share}: both set the same "
                "value; leave one of them out",
                field="swiftkv.prefill_reduction",
                value=share,
            )
        if given is not None:
            return given
        share = 0.5 if share is None else share
        if not 0 < share < 1:
            raise InvalidInputError.for_field(
                "swiftkv.prefill_reduction", share, "; the share of layers that prefill skips is between 0 and 1"
            )
        return num_hidden_layers - min(max(round(share * num_hidden_layers), 1), num_hidden_layers - 1)

    def to_comparable(self, num_hidden_layers: int | None) -> dict[str, Any]:
        """Return a dictionary that is equal for requests of the same student: l replaces its other forms, and
        `prefill_layers` is set only with bypassed layers. Without `num_hidden_layers`, l is as the caller gave it."""
        if num_hidden_layers is not None:
            depth: Any = self.resolve_depth(num_hidden_layers)
        else:
            depth = self.requested_depth or f"prefill_reduction {self.prefill_reduction or 0.5}"
        listed = list(self.prefill_layers or ()) if self.has_bypassed_layers else None
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["prefill_reduction"]
        return {"prefill_layers": listed} | values | {"prefill_layers": listed, "num_key_value_layers": depth}

    def resolve(self, num_hidden_layers: int, num_attention_heads: int | None = None) -> StudentShape:
        """Return the shape for a given teacher; at least one layer is skipped. Raises `InvalidInputError` with the
        accepted values if l, the reduction, g, the prefill layers or `sharing` is invalid.

        Args:
            num_attention_heads: the teacher's query heads, which `mha` caches.
        """
        depth = self.resolve_depth(num_hidden_layers)
        _check_integer("num_key_value_layers", depth)
        _check_integer("key_value_group_size", self.key_value_group_size)
        if not 1 <= depth < num_hidden_layers:
            raise InvalidInputError.for_field(
                "swiftkv.num_key_value_layers",
                depth,
                f"; the teacher has {num_hidden_layers} layers, so 1..{num_hidden_layers - 1} are accepted",
            )
        heads = {"gqa": None, "mqa": 1, "mha": num_attention_heads}
        if self.sharing not in heads:
            raise InvalidInputError.for_field("swiftkv.sharing", self.sharing, f"; {', '.join(heads)} are accepted")
        _check_deep_tail(self.deep_tail, has_own_decode_kv=self.has_own_decode_kv)
        shape = StudentShape(
            num_key_value_layers=depth,
            key_value_group_size=self.key_value_group_size,
            num_key_value_heads_swiftkv=heads[self.sharing],
            early_exit=self.early_exit,
            own_output_projection=self.own_output_projection,
            swiftkv_decode_key_value=self.decode_key_value,
            swiftkv_prefill_layers=tuple(self.prefill_layers or ()) if self.has_bypassed_layers else None,
            swiftkv_deep_tail=self.deep_tail,
        )
        LayerMap(num_hidden_layers, shape)  # refuses a g out of range
        return shape


def parse_layers(text: str) -> list[int]:
    """Parse a list of ascending layers, e.g. "0-2,4" -> [0, 1, 2, 4]. Raises `InvalidInputError` for another form."""
    written = text.replace(" ", "")
    layers: list[int] = []
    readable = len(text) <= MAX_LIST_LENGTH and _RANGES_PATTERN.fullmatch(written) is not None
    readable = readable and all(len(number) <= _MAX_INDEX_DIGITS for number in re.findall(r"\d+", written))
    for first, _, last in (part.partition("-") for part in (written.split(",") if readable else ())):
        more = range(int(first), int(last or first) + 1)
        if not more or (layers and more[0] <= layers[-1]):  # not ascending; unchecked repeats could grow without bound
            readable = False
            break
        layers += more
    if not readable:
        raise InvalidInputError.for_field(
            "prefill_layers", text, "; ascending layers and ranges are accepted, as 0-2,4,6-16"
        )
    return layers


def format_layers(layers: Sequence[int]) -> str:
    """Format ascending layers for `parse_layers`, e.g. [0, 1, 2, 4] -> "0-2,4"."""
    listed = frozenset(layers)
    first = [i for i in layers if i - 1 not in listed]
    last = [i for i in layers if i + 1 not in listed]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def find_deep_start(prompt_length: Lengths, deep_tail: int) -> Lengths:
    """Return the position of a prompt's first deep token, or the positions for an array or tensor of lengths."""
    first = cast("Any", prompt_length) - deep_tail
    return cast("Lengths", max(first, 0) if isinstance(first, int) else first.clip(0))


def find_bypassed_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """Return the layers below the last of `layers` that it omits, e.g. [0, 1, 3] -> (2,)."""
    return tuple(sorted({*range(max(layers, default=0))} - {*layers}))


def refuse_bypass_with_latents(layers: Sequence[int], model_type: str) -> None:
    """Raise `ModelError` for bypassed layers in a model that caches latents (MLA)."""
    raise ModelError.for_field(
        "swiftkv.prefill_layers",
        list(layers),
        f", which {model_type} does not support, since it caches latents (MLA); use swiftkv.num_key_value_layers",
    )


def _make_conflicting_depth_error(layers: Sequence[int]) -> InvalidInputError:
    return InvalidInputError.for_field(
        "swiftkv.prefill_layers",
        list(layers),
        f", which sets l to {layers[-1] + 1}; leave num_key_value_layers and prefill_reduction out",
    )


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError.for_field(f"swiftkv.{name}", value, "; an integer is accepted")


def _check_deep_tail(size: object, *, has_own_decode_kv: bool) -> None:
    """Raise `InvalidInputError` for a deep tail without tokens, or of tokens that share the prompts' K and V."""
    _check_integer("deep_tail", size)
    if not 1 <= cast("int", size) <= MAX_DEEP_TAIL:
        raise InvalidInputError.for_field("swiftkv.deep_tail", size, f"; 1..{MAX_DEEP_TAIL} tokens are accepted")
    if size != 1 and not has_own_decode_kv:
        raise InvalidInputError.for_field(
            "swiftkv.deep_tail", size, "; a value above 1 requires swiftkv.decode_key_value: own"
        )


def _check_layer_list(layers: object, num_hidden_layers: int | None = None) -> None:
    """Raise `InvalidInputError` for a list that is not ascending or has an invalid layer."""
    listed = list(layers) if isinstance(layers, list | tuple) else []
    numbers = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed)
    if not listed or not numbers or sorted(set(listed)) != listed:
        raise InvalidInputError.for_field(
            "swiftkv.prefill_layers", layers, "; an ascending list of layers is accepted, such as [0, 1, 2, 4, 5]"
        )
    if num_hidden_layers is not None and listed[-1] > num_hidden_layers - 2:
        raise InvalidInputError.for_field(
            "swiftkv.prefill_layers",
            listed,
            f"; a model of {num_hidden_layers} layers takes 0 to {num_hidden_layers - 2}, since prompts skip the last "
            "layer",
        )


def equal_cache_group_size(
    num_upper_layers: int, *, num_key_value_heads: int, num_key_value_heads_swiftkv: int, key_value_group_size: int = 1
) -> int:
    """Return the smallest g at which `num_key_value_heads_swiftkv` heads need no more cache than the teacher's heads
    with `key_value_group_size`; `num_upper_layers` if even one group needs more.

    Llama-3.1-8B (16 upper layers, 8 of 32 heads): against g = 4, mha needs g = 16 and mqa g = 1 (table C.1).
    """
    num_heads = num_key_value_heads * -(-num_upper_layers // key_value_group_size)
    num_groups = max(num_heads // num_key_value_heads_swiftkv, 1)
    return -(-num_upper_layers // num_groups)
