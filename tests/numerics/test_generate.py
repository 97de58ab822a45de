"""Every decoding mode of transformers gives the same output with a cache as without one, or is refused; and the layers
that each token runs through."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import causal_lm, convert
from swiftkv_platform.model.cache import count_cache_bytes, get_stored_dtype, make_cache
from swiftkv_platform.model.context import TokenSelection, supports_selection
from tests.support.tiny_models import WINDOW, disturb, family_teacher, random_teacher, random_tokens

ARGUMENTS = {"max_new_tokens": 10, "pad_token_id": 256, "eos_token_id": None, "do_sample": False}
SAMPLING = {"do_sample": True, "temperature": 1.3, "top_k": 20}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 7},
    "chunked static": {"prefill_chunk_size": 7, "cache_implementation": "static"},
}
students = pytest.mark.parametrize("student", ["llama", "mistral"], indirect=True)


def make_teacher(name: str) -> Any:
    """Return a teacher of 5 layers. The Llama's embeddings are untied: tied random ones make it repeat itself."""
    return random_teacher(num_hidden_layers=5) if name == "llama" else family_teacher(name)


def make_student(name: str, l: int = 2, g: int = 2, **arguments: Any) -> Any:  # noqa: E741  # the paper's l
    """Return a student. With l = 2 and g = 2 it has 4 cache layers; Mistral's windows are 16 tokens."""
    return disturb(convert(make_teacher(name), num_key_value_layers=l, key_value_group_size=g, **arguments))


@pytest.fixture
def student(request: pytest.FixtureRequest) -> Any:
    return make_student(getattr(request, "param", "llama"))


@pytest.fixture
def prompts() -> torch.Tensor:
    """[2, 40]; each row repeats itself, so that prompt lookup finds something."""
    half = random_tokens(2, 20)
    return torch.cat((half, half), dim=1)


def generate(model: Any, prompts: torch.Tensor, **arguments: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(prompts, **{**ARGUMENTS, **arguments})


@pytest.mark.parametrize(
    ("student", "mode"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("llama", SAMPLING),
        ("mistral", {**SAMPLING, "num_return_sequences": 3}),
        ("llama", {"num_beams": 3}),
        ("mistral", {"num_beams": 3}),
        ("llama", {**SAMPLING, "num_beams": 3}),
        ("mistral", {"guidance_scale": 1.5}),
        ("llama", {"repetition_penalty": 1.4}),
    ],
    ids=str,
    indirect=["student"],
)
def test_a_mode_gives_what_it_gives_without_a_cache(mode: dict[str, Any], student: Any, prompts: torch.Tensor) -> None:
    expected = generate(student, prompts, use_cache=False, **mode)
    for name, cache in CACHES.items():
        assert torch.equal(generate(student, prompts, **mode, **cache), expected), name


@pytest.mark.slow("torch traces the whole model")
def test_a_static_cache_under_torch_compile(student: Any, prompts: torch.Tensor) -> None:
    """One graph, without breaks; on a GPU `generate()` compiles by itself where the cache is static."""
    expected = generate(student, prompts, use_cache=False)
    compile_config = CompileConfig(backend="eager", fullgraph=True, mode=None)  # traced, without code generation
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    compiled = generate(student, prompts, cache_implementation="static", compile_config=compile_config)
    assert graphs["unique_graphs"] == 1
    assert torch.equal(compiled, expected)


@pytest.mark.parametrize(
    ("student", "kv_cache_dtype"),
    [("llama", "auto"), ("mistral", "auto"), ("llama", "int8"), ("mistral", "fp8")],
    indirect=["student"],
)
def test_drafts_change_no_token(kv_cache_dtype: str, student: Any, prompts: torch.Tensor) -> None:
    """Rejected drafts are cropped from the cache, with sliding windows and in 8 bits too."""
    one, teacher = prompts[:1], make_teacher(student.config.model_type.removesuffix("_swiftkv"))
    expected = generate(student, one, kv_cache_dtype=kv_cache_dtype)
    drafters = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "the teacher": {"assistant_model": teacher},
        "another student": {"assistant_model": make_student("llama", 1, 1)},
    }
    for name, drafter in drafters.items():
        assert torch.equal(generate(student, one, kv_cache_dtype=kv_cache_dtype, **drafter), expected), name
    expected = generate(teacher, one)
    assert torch.equal(generate(teacher, one, assistant_model=student), expected), "the student as the draft model"


@pytest.mark.parametrize(("student", "kv_cache_dtype"), [("llama", "fp8"), ("mistral", "int8")], indirect=["student"])
def test_eight_bits_in_every_mode(kv_cache_dtype: str, student: Any, prompts: torch.Tensor) -> None:
    arguments = {"kv_cache_dtype": kv_cache_dtype, "return_dict_in_generate": True}
    for mode in ({}, {"num_beams": 3}):
        output = generate(student, prompts, **mode, **arguments)
        cache, rows = output.past_key_values, prompts.shape[0] * mode.get("num_beams", 1)
        num_tokens = WINDOW - 1 if student.config.model_type == "mistral_swiftkv" else 49
        assert len(cache.layers) == 4
        assert count_cache_bytes(cache) == 4 * 2 * rows * 2 * num_tokens * (8 + 2)  # 2 heads of 8 elements and a scale
        for other in CACHES.values():
            assert torch.equal(generate(student, prompts, **mode, **arguments, **other).sequences, output.sequences)


@students
def test_prompts_of_every_kind(student: Any, prompts: torch.Tensor) -> None:
    """Left-padded prompts, embeddings instead of tokens, and a prompt of one token."""
    mask = torch.ones_like(prompts)
    mask[0, :13] = 0
    padded = [generate(student, prompts[:1, 13:])[0, 27:], generate(student, prompts[1:])[0, 40:]]
    expected, embeddings = generate(student, prompts)[:, 40:], student.model.embed_tokens(prompts)
    single = generate(student, prompts[:, :1], use_cache=False)
    for name, cache in CACHES.items():
        assert torch.equal(generate(student, prompts, attention_mask=mask, **cache)[:, 40:], torch.stack(padded)), name
        assert torch.equal(student.generate(inputs_embeds=embeddings, **ARGUMENTS, **cache), expected), name
        assert torch.equal(generate(student, prompts[:, :1], **cache), single), name


@students
def test_a_conversation_goes_on(student: Any, prompts: torch.Tensor) -> None:
    """The cache of one turn serves the next turn, which passes all tokens."""
    for name, arguments in CACHES.items():
        first_arguments = {"past_key_values": make_cache(student.config, max_cache_len=100)}
        if "static" not in name:
            first_arguments = arguments
        first = generate(student, prompts, return_dict_in_generate=True, **first_arguments)
        tokens = torch.cat((first.sequences, prompts[:, 3:21]), dim=1)
        chunks = {key: value for key, value in arguments.items() if key == "prefill_chunk_size"}
        second = generate(student, tokens, past_key_values=first.past_key_values, **chunks)
        assert torch.equal(second, generate(student, tokens, use_cache=False)), name


def test_a_backend_that_cannot_select_runs_every_layer(prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    student = make_student("mistral")
    expected = generate(student, prompts, max_new_tokens=3)
    monkeypatch.setattr(causal_lm, "supports_selection", lambda *_: False)
    with tokens_by_layer(student) as counts:
        assert torch.equal(generate(student, prompts, max_new_tokens=3), expected)
    assert counts == {i: [80, 2, 2] for i in range(5)}
    kinds = {"eager": (True, True), "sdpa": (True, True), "flash_attention_2": (True, False)}
    for implementation, expected in {**kinds, "flex_attention": (False, False)}.items():
        config = SimpleNamespace(_attn_implementation=implementation)
        selections = TokenSelection(1), TokenSelection(torch.tensor([3, 5]))
        assert tuple(supports_selection(config, selection) for selection in selections) == expected, implementation


@contextmanager
def tokens_by_layer(model: Any) -> Iterator[dict[int, list[int]]]:
    """Count the tokens of the batch that each forward pass sends through each layer."""
    counts: dict[int, list[int]] = defaultdict(list)

    def count(i: int) -> Any:
        return lambda _module, arguments, _output: counts[i].append(arguments[0].shape[0] * arguments[0].shape[1])

    handles = [layer.mlp.register_forward_hook(count(i)) for i, layer in enumerate(model.model.layers)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def test_depth_of_a_forward_pass(student: Any, prompts: torch.Tensor) -> None:
    student.set_attn_implementation("eager")  # only eager returns attentions
    cases: list[tuple[dict[str, Any], list[int]]] = [  # with the tokens that enter the upper layers
        ({}, [80]),
        ({"logits_to_keep": 1}, [2]),
        ({"logits_to_keep": 5}, [10]),
        ({"logits_to_keep": 40}, [80]),
        ({"logits_to_keep": torch.tensor([3, -1])}, [4]),
        ({"logits_to_keep": torch.tensor([[3], [5]])}, [4]),
        ({"logits_to_keep": torch.tensor([], dtype=torch.long)}, []),
        ({"labels": prompts}, [80]),
        ({"logits_to_keep": 1, "output_hidden_states": True}, [80]),
        ({"logits_to_keep": 1, "output_attentions": True}, [80]),
    ]
    for arguments, upper in cases:
        with tokens_by_layer(student) as counts:
            student(prompts, **arguments)
        assert [counts[i] for i in range(5)] == [[80]] * 2 + [upper] * 3, arguments


@students
def test_prefill_really_skips_the_upper_layers(student: Any, prompts: torch.Tensor) -> None:
    with tokens_by_layer(student) as counts:
        output = generate(student, prompts, max_new_tokens=3, return_dict_in_generate=True)
    assert counts == {i: [80, 2, 2] if i < 2 else [2, 2, 2] for i in range(5)}
    assert len(output.past_key_values.layers) == student.config.layer_map.num_kv_cache_layers == 4
    with tokens_by_layer(student) as counts:
        generate(student, prompts, max_new_tokens=3, prefill_chunk_size=15)
    assert counts == {i: [30, 30, 20, 2, 2] if i < 2 else [2, 2, 2] for i in range(5)}
    with tokens_by_layer(student) as counts:
        output = generate(student, prompts, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    assert counts == {i: [80, 2] for i in range(5)}
    assert [state.shape[1] for state in output.hidden_states[0]] == [40] * 6


def test_what_cannot_be_right_is_refused(student: Any, prompts: torch.Tensor) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"cache_implementation": "quantized"}, "kv_cache_dtype='fp8'"),
        ({"cache_implementation": "offloaded"}, "dynamic and static are accepted"),
        ({"cache_implementation": "offloaded_static"}, "dynamic and static are accepted"),
        ({"cache_implementation": "paged"}, "LLMEngine"),
        ({"assistant_early_exit": 2}, "early_exit='threshold'"),
        ({"kv_cache_dtype": "float8"}, "auto, fp8 or int8"),
        ({"kv_cache_dtype": "fp8", "use_cache": False}, "leave out use_cache=False"),
        ({"kv_cache_dtype": "fp8", "past_key_values": DynamicCache()}, "leave one of them out"),
    ]
    for arguments, message in cases:
        with pytest.raises((InvalidInputError, ModelError), match=message) as caught:
            generate(student, prompts[:1], **arguments)
        assert caught.value.field in arguments
    with pytest.raises(ModelError, match="has 5 layers, but this model in student mode needs 4"):
        generate(student, prompts, past_key_values=DynamicCache(config=student.config))


def test_generation_configurations_carry_the_cache_dtype(student: Any, prompts: torch.Tensor, tmp_path: Any) -> None:
    def stored(model: Any, **arguments: Any) -> Any:
        output = model.generate(prompts, max_new_tokens=2, pad_token_id=256, return_dict_in_generate=True, **arguments)
        return get_stored_dtype(output.past_key_values)

    assert stored(student) is None
    given = GenerationConfig(max_new_tokens=2, pad_token_id=256, return_dict_in_generate=True, kv_cache_dtype="int8")
    assert get_stored_dtype(student.generate(prompts, generation_config=given).past_key_values) is torch.int8
    student.generation_config = GenerationConfig(bos_token_id=256, kv_cache_dtype="fp8")
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path)
    assert stored(loaded) is torch.float8_e4m3fn
    assert stored(loaded, kv_cache_dtype="auto") is None


def test_teacher_mode_keeps_all_layers_and_may_be_quantized(student: Any, prompts: torch.Tensor) -> None:
    expected = generate(student.swiftkv(False), prompts, use_cache=False)
    for cache in CACHES.values():
        output = generate(student, prompts, return_dict_in_generate=True, **cache)
        assert torch.equal(output.sequences, expected)
        assert len(output.past_key_values.layers) == 5
    output = generate(student, prompts, return_dict_in_generate=True, kv_cache_dtype="int8")
    assert count_cache_bytes(output.past_key_values) == 5 * 2 * 2 * 2 * 49 * 10
