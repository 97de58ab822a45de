"""Section `swiftkv` of a job spec: the shape of the student."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import MAX_LAYERS, NumLayers, Range, Spec, make_field_error
from swiftkv_platform.student_shape import MAX_DEEP_TAIL, MAX_LIST_LENGTH, ShapeRequest, parse_layers

_MAX_SHOWN_LENGTH = 120


def _make_layer_list_error(field: str, layers: list[int], problem: str) -> PydanticCustomError:
    return make_field_error(field, layers, f"{field} is {_shorten(repr(layers))}: {problem}")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[:_MAX_SHOWN_LENGTH]}...{text[-1]}"


def _parse_layer_list(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_layers(value)
    except InvalidInputError as error:
        raise ValueError(f"is {_shorten(repr(value))}: use ascending layers and ranges, such as 0-2,4,6-16") from error


_LayerList = Annotated[list[Annotated[int, Range(0, MAX_LAYERS)]], Field(max_length=MAX_LAYERS)]
_LayerListText = Annotated[str, Field(max_length=MAX_LIST_LENGTH)]
_PrefillLayers = Annotated[
    _LayerList | None, BeforeValidator(_parse_layer_list, json_schema_input_type=_LayerList | _LayerListText | None)
]


_DEPTH_FIELDS = {"num_key_value_layers", "prefill_reduction", "prefill_layers"}


class SwiftKVSpec(Spec):
    """Shape and initialization of the student (paper, section 3). In a job that continues from a student, its shape is
    the default."""

    num_key_value_layers: NumLayers | None = None
    """l, 1..L-1: number of layers that prompts run, each with its own KV cache. Exclusive with `prefill_reduction`."""
    prefill_reduction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the L layers that prompts skip: l = L - round(share x L). Default: 0.5 if l is not set either."""
    key_value_group_size: NumLayers = 1
    """g (AcrossKV): number of consecutive layers >= l that share one KV cache layer; 1: no sharing."""
    sharing: Literal["gqa", "mqa", "mha"] = "gqa"
    """Key-value heads of layers >= l (paper, appendix C). `gqa`: as in the teacher; `mqa`: one; `mha`: one per query
    head. The cache size is proportional; `planning.equal_cache_group_size` returns the g of equal size."""
    early_exit: bool = False
    """Train an early-exit head after layer l - 1."""
    own_output_projection: bool = False
    """Add a trained output projection `o_proj_swiftkv` to layers >= l, calibrated to the values that a group shares. It
    recovers most of the quality loss of sharing at no serving cost. Not supported by other engines."""
    initialization: Literal["calibrated", "copied"] = "calibrated"
    """Initialization of `{k,v}_proj_swiftkv`. `calibrated`: ridge regression on the teacher's K and V; `copied`: mean
    of the teacher's weights."""
    decode_key_value: Literal["shared", "own"] = "own"
    """Input of K and V in layers >= l for tokens that run these layers (a prompt's last token and generated tokens).
    `own`: the hidden state of the first layer of each group, as in the teacher; prefill costs the same and quality is
    much higher. In training, texts whose tokens all count are split at random into a prompt, which does not count, and
    a completion. `shared`: the output of layer l - 1, as for other prompt tokens (the paper's form)."""
    prefill_layers: _PrefillLayers = None
    """Layers that prompts run, instead of the first l: an ascending list, or text such as `0-2,4,6-16`. l is then the
    last of them + 1. In skipped layers below l, only K and V are computed, so the same compute is spent on the more
    important layers; `swiftkv analyze --num-prefill-layers` selects them. Requires `decode_key_value: own`. Not
    supported by vLLM."""
    deep_tail: Annotated[int, Range(1, MAX_DEEP_TAIL)] = 1
    """m: number of tokens at a prompt's end that run all layers and keep their own K and V; a prompt of at most m
    tokens skips nothing. Longer tails answer short prompts better and cost m / (prompt length) of the skipped compute.
    Requires `decode_key_value: own`. Not supported by vLLM."""
    calibration_tokens: Annotated[int, Range(1024, 10**12)] = 16384
    """Number of tokens for the calibrated initialization."""

    @model_validator(mode="after")
    def _validate_one_l(self) -> Self:
        if self.num_key_value_layers is not None and self.prefill_reduction is not None:
            raise ValueError("set num_key_value_layers or prefill_reduction, not both")
        return self

    @model_validator(mode="after")
    def _validate_prefill_layers(self) -> Self:
        layers = self.prefill_layers
        if layers is None:
            return self
        if not layers or sorted(set(layers)) != layers:
            problem = "use an ascending list without repeats, such as [0, 1, 2, 4, 5]"
        elif self.prefill_reduction is not None:
            problem = f"it cannot be combined with prefill_reduction {self.prefill_reduction}; remove prefill_reduction"
        elif self.num_key_value_layers not in (None, layers[-1] + 1):
            problem = (
                f"its last layer implies num_key_value_layers {layers[-1] + 1}, not {self.num_key_value_layers}; "
                "remove num_key_value_layers"
            )
        elif self.request.has_bypassed_layers and self.decode_key_value != "own":
            problem = "it skips layers below l, which requires decode_key_value: own"
        else:
            return self
        raise _make_layer_list_error("prefill_layers", layers, problem)

    @model_validator(mode="after")
    def _validate_deep_tail(self) -> Self:
        if self.deep_tail > 1 and self.decode_key_value != "own":
            raise make_field_error(
                "deep_tail",
                self.deep_tail,
                f"deep_tail is {self.deep_tail}; a value above 1 requires decode_key_value: own",
            )
        return self

    @property
    def request(self) -> ShapeRequest:
        """The student's shape, as far as it is known without a teacher."""
        return ShapeRequest.from_spec(self)

    def inherit_from(self, parent: Self) -> Self:
        """Return the section of a job that continues from `parent`: the fields of the shape that are not set are the
        parent's."""
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        if given & _DEPTH_FIELDS:
            given |= _DEPTH_FIELDS
        if "decode_key_value" in given and self.decode_key_value != parent.decode_key_value:
            given.add("deep_tail")
        names = {field.name for field in fields(ShapeRequest)} - given
        return self.model_copy(update={name: getattr(parent, name) for name in names})

    def make_layer_list_error(self, problem: str) -> PydanticCustomError:
        """Return the error of a rule of the whole spec for `prefill_layers`."""
        return _make_layer_list_error("swiftkv.prefill_layers", self.prefill_layers or [], problem)

    @property
    def is_calibrated(self) -> bool:
        """Whether the initialization is fitted to the teacher's activations."""
        return self.initialization != "copied"
