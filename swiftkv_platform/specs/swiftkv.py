"""Section of the job spec on the SwiftKV transformation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import MAX_LAYERS, Layers, Range, Spec, make_field_error
from swiftkv_platform.student_shape import MAX_LIST_LENGTH, ShapeRequest, parse_layers

_MAX_SHOWN_LENGTH = 120
"""Characters of a refused list in a message."""


def _make_layer_list_error(layers: list[int] | str, problem: str) -> PydanticCustomError:
    """An error about `swiftkv.prefill_layers`."""
    field, written = "swiftkv.prefill_layers", repr(layers)
    shown = written if len(written) <= _MAX_SHOWN_LENGTH else f"{written[:_MAX_SHOWN_LENGTH]}...{written[-1]}"
    return make_field_error(field, layers, f"{field} is {shown}: {problem}")


def _parse_layer_list(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_layers(value)
    except InvalidInputError as error:
        raise _make_layer_list_error(value, "use ascending layers and ranges, such as 0-2,4,6-16") from error


_LayerList = Annotated[list[Annotated[int, Range(0, MAX_LAYERS)]], Field(max_length=MAX_LAYERS)]
_LayerListText = Annotated[str, Field(max_length=MAX_LIST_LENGTH)]
_PrefillLayers = Annotated[
    _LayerList | None, BeforeValidator(_parse_layer_list, json_schema_input_type=_LayerList | _LayerListText | None)
]


class SwiftKVSpec(Spec):
    """The transformation (paper, section 3)."""

    num_key_value_layers: Layers | None = None
    """l: layers that compute their own KV, 1..L-1. Exclusive with `prefill_reduction`."""
    prefill_reduction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the layers that prefill skips; l = L - round(share x L). Default: 0.5 if neither is given."""
    key_value_group_size: Layers = 1
    """AcrossKV: consecutive layers that share one KV cache layer; 1 shares nothing."""
    sharing: Literal["gqa", "mqa", "mha"] = "gqa"
    """Key-value heads of layers >= l (paper, appendix C): the teacher's, one, or one for each query head. The cache
    grows with them; the g of equal size is `planning.equal_cache_group_size`."""
    early_exit: bool = False
    """Train an exit head at layer l."""
    own_output_projection: bool = False
    """Give layers >= l an `o_proj_swiftkv`, which the calibrated start fits to the values that a group shares, and
    which is trained with q, k and v. It recovers most of the quality that sharing costs, and is free in serving; other
    engines do not support it."""
    initialization: Literal["calibrated", "copied"] = "calibrated"
    """Start of `{k,v}_proj_swiftkv`: ridge regression on the teacher's own K and V, or the mean of its weights."""
    decode_key_value: Literal["shared", "own"] = "own"
    """Source of K and V in layers >= l for tokens that run through them: a prompt's last token and all generated ones.
    `own`: their own hidden state in the first layer of each group, as in the teacher, by projections that are trained
    too. Prefill costs the same, and far less of the teacher's quality is lost. A text whose tokens all count is then
    split at random into a prompt, which is not counted, and the rest. `shared`: x, as for the rest of a prompt (the
    paper's form); the default for a job that continues from a student in this form."""
    prefill_layers: _PrefillLayers = None
    """Layers that prompts run through, ascending, as a list or as `0-2,4,6-16`, instead of `num_key_value_layers`,
    which is then the last of them + 1. Prompts bypass the layers in between, where only their K and V are computed, so
    that the same prefill compute goes to the layers that matter more; `swiftkv analyze --num-prefill-layers` measures
    which. Requires `decode_key_value: own`. Served by this project's engine, not by vLLM."""
    calibration_tokens: Annotated[int, Range(1024, 10**12)] = 16384
    """Tokens used for the calibrated start."""

    @model_validator(mode="after")
    def _validate_one_l(self) -> Self:
        if self.num_key_value_layers is not None and self.prefill_reduction is not None:
            raise ValueError("give num_key_value_layers or prefill_reduction, not both")
        return self

    @model_validator(mode="after")
    def _validate_prefill_layers(self) -> Self:
        layers = self.prefill_layers
        if layers is None:
            return self
        if not layers or sorted(set(layers)) != layers:
            problem = "use an ascending list without repeats, such as [0, 1, 2, 4, 5]"
        elif self.prefill_reduction is not None:
            problem = f"it cannot be combined with prefill_reduction {self.prefill_reduction}; leave that out"
        elif self.num_key_value_layers not in (None, layers[-1] + 1):
            problem = (
                f"its last layer makes num_key_value_layers {layers[-1] + 1}, not {self.num_key_value_layers}; leave "
                "that out"
            )
        elif self.request.has_bypassed_layers and self.decode_key_value != "own":
            problem = f"it cannot be combined with decode_key_value {self.decode_key_value!r}; use own"
        else:
            return self
        raise _make_layer_list_error(layers, problem)

    @property
    def request(self) -> ShapeRequest:
        """The student's shape, as far as it is known without a teacher."""
        return ShapeRequest.from_spec(self)

    def inherit_from(self, parent: Self) -> Self:
        """Return the section of a job that continues from `parent`, with its form of deep tokens by default."""
        if "decode_key_value" in self.model_fields_set:
            return self
        return self.model_copy(update={"decode_key_value": parent.decode_key_value})

    def make_layer_list_error(self, problem: str) -> PydanticCustomError:
        """Return an error about `prefill_layers`."""
        return _make_layer_list_error(self.prefill_layers or [], problem)

    @property
    def is_calibrated(self) -> bool:
        """Whether the start is fitted to the teacher's activations."""
        return self.initialization != "copied"
