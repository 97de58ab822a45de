"""Models as users bring them: every way to load one gives transformers' logits or the same refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from swiftkv_platform.configs import CONFIG_CLASSES
from swiftkv_platform.distillation.calibration_text import read_calibration_text
from swiftkv_platform.distillation.strategy import EvaluationModel
from swiftkv_platform.engine.loading import describe_model, load_model
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.evaluation.analysis import AnalysisOptions, analyze
from swiftkv_platform.families import FAMILIES
from swiftkv_platform.jobs.worker.prepare import prepare_run
from swiftkv_platform.jobs.worker.setup import load_student, open_lazy_student
from swiftkv_platform.model import convert, convert_checkpoint, load_dense
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.model.weights.lazy_student import LazyStudent, save_lazy_student
from swiftkv_platform.model.weights.writing import copy_companion_files
from swiftkv_platform.planning import plan
from swiftkv_platform.sources.model_directories import TOKENIZER_VIEW, create_model_view
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.student_shape import STUDENT_KEYS, RequestedStudentShape
from tests.support.checkpoints import rewrite, save
from tests.support.fakes.peft import CONFIG
from tests.support.parameters import few
from tests.support.tiny_models import family_teacher, random_teacher, random_tokens

SHAPE: dict[str, Any] = {"num_key_value_layers": 2}
STUDENT = {"prefill_reduction": None, "key_value_group_size": 1, "early_exit": False, "sharing": "gqa"} | SHAPE
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CPU = torch.device("cpu")
TEACHER = EngineConfig(dtype="float32", swiftkv=False, fuse_weights=False, native_kernels=False)

Write = Callable[[Path], object]
"""Function that writes a model's directory."""


def change_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; `...` removes a field."""
    document = (json.loads(path.read_text()) if path.exists() else {}) | fields
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


def brought(
    tensors: Callable[[dict[str, Any]], object] = len,
    *,
    tied: bool | None = False,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    files: Callable[[Path], object] = str,
) -> Write:
    """Return a writer of a model whose tensors, configs and files are changed after it is saved. `tied`:
    `tie_word_embeddings` in config.json; None to omit it."""

    def write(directory: Path) -> None:
        save(random_teacher(), directory)
        said = {"tie_word_embeddings": ... if tied is None else tied}
        change_json(directory / "config.json", **said, **(config or {}))
        rewrite(directory, tensors)
        if generation is not None:
            change_json(directory / "generation_config.json", **generation)
        if tokenizer is not None:
            change_json(directory / "tokenizer_config.json", **tokenizer)
        files(directory)

    return write


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def equal_heads(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def in_shards(directory: Path) -> None:
    """Store each tensor in its own file."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    places = {name: f"part-{i}.safetensors" for i, name in enumerate(tensors)}
    for name, place in places.items():
        save_file({name: tensors[name]}, directory / place, metadata={"format": "pt"})
    change_json(directory / "model.safetensors.index.json", metadata={}, weight_map=places)


def stale_index(directory: Path) -> None:
    change_json(directory / "model.safetensors.index.json", weight_map={HEAD: "gone.safetensors"})


def torn_index(directory: Path) -> None:
    in_shards(directory)
    next(iter(sorted(directory.glob("part-*")))).unlink()


def listed_index(directory: Path) -> None:
    in_shards(directory)
    change_json(directory / "model.safetensors.index.json", weight_map=[HEAD, EMBEDDING])


def pointer(directory: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 900\n"
    (directory / "model.safetensors").write_text(text)


def pickled(directory: Path) -> None:
    path = directory / "model.safetensors"
    torch.save(load_file(path), directory / "pytorch_model.bin")
    path.unlink()


GOOD: dict[str, Write] = {
    "untied": brought(),
    "tied, the embedding stored": brought(drop(HEAD), tied=True),
    "tied, the head stored": brought(drop(EMBEDDING), tied=True),
    "tied, both stored and equal": brought(equal_heads, tied=True),
    "tied, another head stored": brought(tied=True),
    "tied, another head in another file": brought(tied=True, files=in_shards),
    "nothing said, another head stored": brought(tied=None),
    "no generation config": brought(files=lambda path: (path / "generation_config.json").unlink()),
    "an index of earlier files": brought(files=stale_index),
    "dtype by its old name": brought(config={"dtype": ..., "torch_dtype": "float32"}),
    "buffers of old versions": brought(
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    ),
    "generation parameters in config.json": brought(
        config={"temperature": 0.7, "do_sample": True}, files=lambda path: (path / "generation_config.json").unlink()
    ),
    "a padding id counted from the end": brought(config={"pad_token_id": -1}),
    "a window that its family does not read": brought(config={"sliding_window": 8}),
    "layers of types that its family does not read": brought(
        config={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3}
    ),
}


def adapted(directory: Path) -> None:
    save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 2)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, "base_model_name_or_path": "org/base"}))


def adapter_alone(directory: Path) -> None:
    directory.mkdir()
    adapted(directory)


BAD: dict[str, tuple[Write, str]] = {
    "untied, no head": (brought(drop(HEAD)), r"lacks 1 tensor .*lm_head\.weight"),
    "untied, no embedding": (brought(drop(EMBEDDING)), r"lacks 1 tensor .*embed_tokens"),
    "tied, neither stored": (brought(lambda t: (t.pop(HEAD), t.pop(EMBEDDING)), tied=True), "lacks 2 tensors"),
    "pickles": (brought(files=pickled), r"pickles \(\.bin\)"),
    "a file of the index is missing": (
        brought(files=torn_index),
        "names part-0.safetensors, which does not exist",
    ),
    "an index without files": (brought(files=listed_index), "index.json has no weight_map that can be read"),
    "cloned without Git LFS": (brought(files=pointer), "model.safetensors is a Git LFS pointer"),
    "dtype with its module": (brought(config={"dtype": "torch.float32"}), "config.json has dtype 'torch.float32'; one"),
    "no such activation": (brought(config={"hidden_act": "sulu"}), "config.json has hidden_act 'sulu'; one of"),
    "no such kind of RoPE": (
        brought(config={"rope_parameters": ..., "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}),
        "config.json has rope_scaling.type 'mrope'; one of default, linear",
    ),
    "RoPE that lacks a factor": (
        brought(config={"rope_parameters": ..., "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        "config.json has rope_scaling.rope_type 'llama3'; it requires rope_scaling.low_freq_factor",
    ),
    **{
        f"a student's {key}": (
            brought(config={key: value}),
            f"config.json has {key} .*; model_type 'llama' has no such key",
        )
        for key, value in (
            ("num_key_value_layers", 2),
            ("swiftkv_prefill_only", True),
            ("swiftkv_prefill_layers", None),
        )
    },
    "a quantization without a method": (brought(config={"quantization_config": {}}), "quant_method None, which is not"),
    "a family that is not read": (brought(config={"model_type": "gpt2"}), "model_type 'gpt2', which is not supported"),
    "a family that is nobody's": (brought(config={"model_type": "gpt99"}), "model_type 'gpt99', which is not"),
    "weights that are no numbers": (
        brought(lambda t: t["model.layers.1.mlp.up_proj.weight"][3].fill_(float("nan"))),
        r"its model\.layers\.1\.mlp\.up_proj\.weight has values that are not finite",
    ),
    "an infinite head": (brought(lambda t: t[HEAD][:1].fill_(float("inf")), tied=True), "lm_head.weight has values"),
    "an adapter beside full weights": (
        brought(files=adapted),
        r"has a PEFT adapter \(adapter_config.json\) and other weights \(model.*\); .*remove",
    ),
    "an adapter alone": (
        adapter_alone,
        "its adapter_config.json belongs to a PEFT adapter, which is not merged here; .*merge_and_unload of peft"
        "|its base_model_name_or_path is 'org/base', neither a directory nor a model of the hub",  # a job merges it
    ),
    "gptq": (brought(config={"quantization_config": {"quant_method": "gptq", "bits": 4}}), "quant_method 'gptq'.*FP8"),
    "an end that is a word": (
        brought(generation={"eos_token_id": "</s>"}),
        "generation_config.json has eos_token_id '<",
    ),
    "generation config that is a list": (
        brought(files=lambda path: (path / "generation_config.json").write_text("[]")),
        "generation_config.json is refused .*not a JSON object",
    ),
}
UNEMBEDDED: dict[str, Write] = {
    "a padding token that is added": brought(tokenizer={"pad_token": "<pad>"}),
    "tokens that are added": brought(tokenizer={"additional_special_tokens": ["<tool>"]}),
    "tokens at places of their own": brought(
        tokenizer={"added_tokens_decoder": {"300": {"content": "<image>", "special": True}}}
    ),
    "a file of added tokens": brought(files=lambda path: change_json(path / "added_tokens.json", **{"<tool>": 258})),
}
ODD: tuple[Any, ...] = (None, "x", -1, 0, [], 3, 1 << 40, ...)
"""Values to try for every field of a configuration; the last one removes the field."""
FUZZED = ("llama", "deepseek_v2-lora", "gemma3_text", "phi3-partial")


def test_a_students_keys_are_those_that_its_configuration_adds() -> None:
    assert set(STUDENT_KEYS) == set(CONFIG_CLASSES["llama"].__annotations__)


def spec_of(directory: Path) -> JobSpec:
    data = directory.parent / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"the number {i} of many rows"}) + "\n" for i in range(40)))
    return JobSpec.model_validate(
        {
            "name": "brought",
            "model": {"name_or_path": str(directory), "dtype": "float32"},
            "swiftkv": SHAPE,
            "data": {"sources": [{"name_or_path": str(data)}], "max_length": 64},
            "training": {"max_steps": 1},
            "resources": {"num_workers": 1},
        }
    )


def prepared(directory: Path) -> Any:
    plan, _ = prepare_run(spec_of(directory), directory.parent / "rows")
    return open_filled(directory) if plan.total_steps else None


def open_filled(directory: Path) -> Any:
    lazy = open_lazy_student(spec_of(directory), str(directory))
    lazy.load_parameters(lazy.model)
    return lazy.model


def measured(directory: Path) -> Any:
    """The model as FSDP2 shards it."""
    spec = spec_of(directory)
    return EvaluationModel(open_lazy_student(spec, str(directory)), spec.distillation, sharded=True, device=CPU)


def saved(directory: Path) -> Any:
    """The artifact of a job, loaded by the engine."""
    lazy, target = open_lazy_student(spec_of(directory), str(directory)), directory.with_name("saved")
    target.mkdir()
    save_lazy_student(lazy, target, teacher=True)
    lazy.model.config.save_pretrained(target)
    return load_model(target, TEACHER).model


def streamed(directory: Path) -> Any:
    convert_checkpoint(directory, directory.with_name("student"), **SHAPE)
    return AutoModelForCausalLM.from_pretrained(directory.with_name("student"), swiftkv=False)


def in_memory(directory: Path) -> Any:
    load_dense(directory)  # raises; transformers would load random weights
    return convert(AutoModelForCausalLM.from_pretrained(directory), **SHAPE)


WAYS: dict[str, Callable[[Path], Any]] = {
    "preparation": prepared,
    "ddp": lambda path: load_student(spec_of(path), str(path)),
    "module by module": open_filled,
    "fsdp2": measured,
    "saved after training": saved,
    "converted file by file": streamed,
    "converted in memory": in_memory,
    "dense": load_dense,
    "engine": lambda path: load_model(path, TEACHER).model,
}


def planned(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


TOKENIZING: dict[str, Callable[[Path], Any]] = {
    "preparation": prepared,
    "converted file by file": streamed,
    "engine": lambda path: load_model(path, TEACHER),
    "vLLM": lambda path: describe_model(path, TEACHER),
    "calibration": lambda path: next(read_calibration_text(str(path), ["builtin:python-stdlib"], 64)),
    "depths": lambda path: analyze("", planned(path), str(path), [], AnalysisOptions()),
}


def logits_of(model: Any) -> torch.Tensor:
    if isinstance(model, EvaluationModel):
        gathered: torch.Tensor = model(logits_of)
        return gathered
    with torch.no_grad():
        logits: torch.Tensor = (model.swiftkv(False) if hasattr(model, "swiftkv") else model)(
            random_tokens(1, 40)
        ).logits
    return logits


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", few(GOOD, list(GOOD)[::4]))
def test_every_way_comes_to_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    GOOD[name](tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected, tied = logits_of(reference), reference.lm_head.weight is reference.model.embed_tokens.weight
    assert describe_model(tmp_path / "model", TEACHER).config.tie_word_embeddings == tied, "the config that vLLM reads"
    for way, load in WAYS.items():
        torch.testing.assert_close(logits_of(load(tmp_path / "model")), expected, msg=lambda m, way=way: f"{way}: {m}")


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", BAD)
def test_every_way_refuses_what_is_incomplete(name: str, tmp_path: Path) -> None:
    write, complaint = BAD[name]
    write(tmp_path / "model")
    for way, load in WAYS.items():
        with pytest.raises(ModelError, match=complaint):
            pytest.fail(f"{way} took {load(tmp_path / 'model')}")


@pytest.mark.parametrize("name", UNEMBEDDED)
def test_every_way_refuses_ids_that_are_not_embedded(name: str, tmp_path: Path) -> None:
    UNEMBEDDED[name](tmp_path / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab()
    highest = max(loaded.values())
    assert highest >= 258, "this version of transformers adds the token"
    for way, load in TOKENIZING.items():
        with pytest.raises(ModelError, match=rf"has ids up to {highest} .*vocab_size is 258"):
            pytest.fail(f"{way} took {load(tmp_path / 'model')}")


@pytest.mark.parametrize("family", few(FUZZED, FUZZED[:1]))
def test_odd_values_of_a_configuration_are_refused_in_a_sentence(family: str, tmp_path: Path) -> None:
    """A model with an odd value loads and runs, or an error names the file."""
    family_teacher(family).save_pretrained(tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())
    rope = good["rope_parameters"]
    keys = good.keys() - ({"transformers_version"} if family == "llama" else LlamaConfig().to_dict().keys())
    cases = [{key: value} for key in sorted(keys) for value in ODD]
    cases += [{"rope_parameters": rope | {key: value}} for key in rope for value in ODD[:-1]]
    for case in cases:
        change_json(tmp_path / "config.json", **good | case)
        for work in (run_lazy, lambda path: describe_model(path, TEACHER), plan):
            with torch.no_grad():
                refusal = refusal_of(work, tmp_path, case)
            assert refusal is None or ("config.json" in refusal and "\n" not in refusal), refusal


def run_lazy(directory: Path) -> None:
    lazy = LazyStudent.open(directory, RequestedStudentShape(**STUDENT), {})
    lazy.load_parameters(lazy.model)
    lazy.model(random_tokens(1, 4))


def refusal_of(work: Callable[[Path], object], path: Path, case: dict[str, Any]) -> str | None:
    try:
        work(path)
    except InvalidInputError as error:
        return error.message
    except Exception as error:
        pytest.fail(f"{case} ended as {type(error).__name__}: {error}")
    return None


def test_a_quantization_that_vllm_alone_reads_is_described_for_it(tmp_path: Path) -> None:
    brought(config={"quantization_config": {"quant_method": "awq", "bits": 4}})(tmp_path)
    assert describe_model(tmp_path, TEACHER).context_length == 256
    with pytest.raises(ModelError, match="quant_method 'awq'"):
        load_model(tmp_path, TEACHER)


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "▁": 257, "▁he": 258, "▁world": 259}
SENTENCE_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level(*, add_prefix_space: bool = False, normalizer: Any = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces(*, normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any = SENTENCE_DECODER) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=BYTES, merges=[], byte_fallback=True, unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(piece, -float(number)) for piece, number in BYTES.items()], unk_id=256))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


TOKENIZER_FILES = {
    "bytes": byte_level,
    "bytes with a prefix space": lambda: byte_level(add_prefix_space=True),
    "composed and in lower case": lambda: byte_level(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    ),
    "pieces with a prepended space": lambda: sentence_pieces(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=[*SENTENCE_DECODER, decoders.Strip(" ", 1, 0)],
    ),
    "pieces as they are": lambda: sentence_pieces(normalizer=normalizers.Replace(" ", "▁")),
    "pieces between spaces": lambda: sentence_pieces(
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    ),
    "unigram": unigram,
}
TOKENIZER_CLASSES = (
    *(None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2TokenizerFast"),
    *("GemmaTokenizerFast", "CohereTokenizer", "T5TokenizerFast", "NoSuchTokenizer"),
)
SENTENCES = [
    *(
        "hello world to all",
        "  two  spaces ",
        "你好世界",
        "مرحبا بالعالم",
        "😀👍🏽 Ü e\u0301",
        "1234 56.7",
        "I can't . ,",
    ),
    "def f(x):\n\treturn x\r\n  \n",
]


def read_back(tokenizer: Any) -> list[tuple[list[int], str]]:
    return [(ids, tokenizer.decode(ids)) for ids in tokenizer(SENTENCES, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_tokenizer_is_that_of_its_file_whatever_class_is_named(name: str, tmp_path: Path) -> None:
    file = TOKENIZER_FILES[name]()
    expected = [(each.ids, file.decode(each.ids)) for each in file.encode_batch(SENTENCES)]
    different = []
    for family in FAMILIES:
        for number, tokenizer_class in enumerate(TOKENIZER_CLASSES):
            model, copy = tmp_path / f"{family}-{number}", tmp_path / f"{family}-{number}-copy"
            model.mkdir()
            copy.mkdir()
            file.save(str(model / "tokenizer.json"))
            (model / "config.json").write_text(json.dumps({"model_type": family}))
            if tokenizer_class is not None:
                (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
            copy_companion_files(model, copy)
            (copy / "config.json").write_text(json.dumps({"model_type": f"{family}_swiftkv"}))
            loaded = {
                "ours": load_tokenizer(model, 1 << 20),
                "vLLM's": AutoTokenizer.from_pretrained(create_model_view(model, tmp_path / "views") / TOKENIZER_VIEW),
                "a student's, by transformers": AutoTokenizer.from_pretrained(copy),
            }
            different += [(family, tokenizer_class, who) for who, each in loaded.items() if read_back(each) != expected]
    assert different == []
