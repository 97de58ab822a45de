"""Students written file by file equal those made in memory, bit for bit; an export drops only the teacher. Errors in a
checkpoint are reported before weights are read, and leave no files behind."""

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.errors import ConflictError, ModelError
from swiftkv_platform.model import convert, convert_checkpoint, export
from swiftkv_platform.model.weights import checkpoint
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from tests.support.checkpoints import BLOCKS, ROWS, SHAPE, TENSORS, rewrite, save, save_fp8
from tests.support.parameters import few
from tests.support.tiny_models import FAMILY_CONFIGS, family_teacher, random_teacher, random_tokens


def assert_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def assert_same_directory(streamed: Path, in_memory: Path) -> None:
    """Assert that both directories load as the same model."""
    actual, expected = (AutoModelForCausalLM.from_pretrained(path) for path in (streamed, in_memory))
    assert_equal(actual, expected)
    assert actual.config.to_diff_dict() == expected.config.to_diff_dict()
    assert actual.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize("name", few(FAMILY_CONFIGS))
def test_streamed_equals_in_memory(name: str, tmp_path: Path) -> None:
    teacher = save(family_teacher(name), tmp_path / "teacher", max_shard_size="100KB")
    assert len(set(Checkpoint.open(teacher).shards.values())) > 3
    convert(teacher, **SHAPE, early_exit=True).save_pretrained(tmp_path / "in-memory")
    convert_checkpoint(teacher, tmp_path / "streamed", **SHAPE, early_exit=True, max_shard_bytes=50_000)
    assert_same_directory(tmp_path / "streamed", tmp_path / "in-memory")


@pytest.mark.parametrize(
    ("sharing", "dtype"), [("mqa", torch.float32), ("mha", torch.bfloat16), ("gqa", torch.float32)]
)
def test_other_starts_are_streamed_from_one_file(sharing: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """With shared heads, and with the calibrated start, from a teacher in one file."""
    teacher = save(random_teacher(attention_bias=True, tie_word_embeddings=True).to(dtype), tmp_path / "teacher")
    shape: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 3, "sharing": sharing}
    shape |= {"own_output_projection": sharing == "mqa", "early_exit": True}
    if sharing == "gqa":
        shape["calibration"] = [random_tokens(8, 64, seed=1)]
    student = convert(teacher, **shape)
    student.save_pretrained(tmp_path / "in-memory")
    written = convert_checkpoint(teacher, tmp_path / "streamed", **shape)
    assert_same_directory(tmp_path / "streamed", tmp_path / "in-memory")
    assert written.new_bytes == sum(p.nbytes for p in student.swiftkv_parameters().values())


def test_the_teachers_files_are_linked_or_copied_as_they_are(tmp_path: Path) -> None:
    teacher = save(random_teacher(), tmp_path / "teacher", max_shard_size="100KB")
    (teacher / "README.md").write_text("the teacher's")
    files: Any
    for files in ("link", "copy"):
        target = convert_checkpoint(teacher, tmp_path / files, **SHAPE, files=files).path
        for tensor, shard in Checkpoint.open(teacher).shards.items():
            placed = target / Checkpoint.open(target).shards[tensor]
            assert placed.samefile(teacher / shard) == (files == "link")
            assert placed.read_bytes() == (teacher / shard).read_bytes()
        assert (target / "tokenizer.json").read_bytes() == (teacher / "tokenizer.json").read_bytes()
        assert not (target / "README.md").exists()


def test_saving_over_a_student_leaves_its_teacher_alone(tmp_path: Path) -> None:
    teacher = save(random_teacher(), tmp_path / "teacher", max_shard_size="100KB")
    before = {path.name: path.read_bytes() for path in teacher.iterdir()}
    student = convert_checkpoint(teacher, tmp_path / "student", **SHAPE).path
    export(student, tmp_path / "export")
    for directory in (student, tmp_path / "export"):
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        with torch.no_grad():
            loaded.model.embed_tokens.weight.zero_()
        loaded.save_pretrained(directory, max_shard_size="100KB")
    assert {path.name: path.read_bytes() for path in teacher.iterdir()} == before


def test_new_files_are_as_readable_as_others(tmp_path: Path) -> None:
    teacher = save(random_teacher(), tmp_path / "teacher", max_shard_size="100KB")
    export(convert_checkpoint(teacher, tmp_path / "student", **SHAPE).path, tmp_path / "export", files="copy")
    for directory in (tmp_path / "student", tmp_path / "export"):
        index = (directory / "model.safetensors.index.json").stat().st_mode
        made = [path.stat().st_mode for path in directory.glob("*.safetensors") if path.stat().st_nlink == 1]
        assert set(made) == {index}


def test_progress_counts_every_tensor_and_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    teacher = save(random_teacher(), tmp_path / "teacher")

    def fail(done: int, _total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(teacher, tmp_path / "student", **SHAPE, max_shard_bytes=1, progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    seen: list[tuple[int, int]] = []
    written = convert_checkpoint(teacher, tmp_path / "student", **SHAPE, progress=lambda *step: seen.append(step))
    assert seen == [(n, written.num_new_tensors) for n in range(1, written.num_new_tensors + 1)]


def test_converting_holds_a_few_tensors_of_its_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = save(random_teacher(), tmp_path / "teacher", max_shard_size="100KB")
    read, seen, held = checkpoint._read_tensor, [], []

    def watched(*arguments: Any) -> torch.Tensor:
        tensor = read(*arguments)
        seen.append((weakref.ref(tensor), tensor.nbytes))
        return tensor

    monkeypatch.setattr(checkpoint, "_read_tensor", watched)
    convert_checkpoint(
        *(teacher, tmp_path / "student"),
        **SHAPE,
        progress=lambda *_: held.append(sum(size for reference, size in seen if reference() is not None)),
    )
    assert max(held) < sum(size for _, size in seen) / 4


@pytest.mark.parametrize(
    ("name", "streamed", "own_output_projection"),
    [("llama", False, True), ("qwen2", True, False), ("mistral", True, True)],
)
def test_export_drops_the_teacher(
    name: str, streamed: bool, own_output_projection: bool, prompt: torch.Tensor, tmp_path: Path
) -> None:
    student = convert(family_teacher(name), **SHAPE, early_exit=True, own_output_projection=own_output_projection)
    expected = student(prompt[None]).logits
    source = student
    if streamed:
        source = save(student, tmp_path / "student", max_shard_size="100KB")
    export(source, tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    whole, left = (set(model.state_dict()) for model in (student, exported))
    lost = {name.removeprefix("model.layers.") for name in whole - left}
    assert {name.split(".")[0] for name in lost} == {"2", "3", "4"}
    of_output = {"o_proj"} if own_output_projection else set()
    assert {name.split(".")[2] for name in lost} == {"q_proj", "k_proj", "v_proj"} | of_output
    assert torch.equal(exported(prompt[None]).logits, expected)
    for teacher_mode in (
        lambda: exported.swiftkv(False),
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "export", swiftkv=False),
        lambda: type(exported).from_pretrained(tmp_path / "export", swiftkv=False),
        lambda: export(tmp_path / "export", tmp_path / "again", teacher=True),
    ):
        with pytest.raises(ModelError, match="exported without"):
            teacher_mode()
    exported.save_pretrained(tmp_path / "again")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(prompt[None]).logits, expected)
    student.swiftkv(False)(prompt[None])  # the model in memory is unchanged


@pytest.mark.parametrize(("name", "streamed"), [("llama", False), ("qwen3", True)])
def test_export_of_what_prefills(name: str, streamed: bool, tmp_path: Path) -> None:
    """A prefill export keeps the embedding, the layers below l and each group's K and V projections; it cannot
    generate."""
    student = convert(family_teacher(name), **SHAPE, early_exit=True, decode_key_value="own")
    source = save(student, tmp_path / "student", max_shard_size="100KB") if streamed else student
    export(source, tmp_path / "half", prefill_only=True)
    kept = Checkpoint.from_directory(tmp_path / "half").shards
    above = {name.removeprefix("model.layers.") for name in kept if re.match(r"model\.layers\.[234]\.", name)}
    parts = ("k_proj_swiftkv", "v_proj_swiftkv", *(["k_norm"] if name == "qwen3" else []))
    leaders = student.config.layer_map.leaders
    assert above == {f"{leader}.self_attn.{part}.weight" for leader in leaders for part in parts}
    assert {name for name in kept if not name.startswith("model.layers.")} == {
        "model.embed_tokens.weight",
        "model.norm_swiftkv.weight",
    }
    for refused in (
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "half"),
        lambda: export(tmp_path / "half", tmp_path / "again"),
    ):
        with pytest.raises(ModelError, match="cannot generate tokens"):
            refused()
    with pytest.raises(ModelError, match="teacher mode also decodes; omit prefill_only"):
        export(source, tmp_path / "again", teacher=True, prefill_only=True)


def test_exports_and_conversions_of_the_other_kind(tmp_path: Path) -> None:
    """An export with its teacher equals the student; a teacher cannot be exported, nor a student converted again."""
    student = convert(random_teacher(), **SHAPE)
    export(student, tmp_path / "one", teacher=True)
    export(tmp_path / "one", tmp_path / "two", teacher=True)
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "two"), student)
    with pytest.raises(ModelError, match="without SwiftKV; convert it first"):
        export(save(random_teacher(), tmp_path / "teacher"), tmp_path / "export")
    with pytest.raises(ModelError, match="is a SwiftKV student already"):
        convert(tmp_path / "two", **SHAPE)


@pytest.mark.parametrize("quantization", [ROWS, TENSORS, BLOCKS], ids=["fbgemm", "compressed-tensors", "fine-grained"])
def test_fp8_teachers_become_what_they_stand_for(
    quantization: dict[str, Any], prompt: torch.Tensor, tmp_path: Path
) -> None:
    exact = save_fp8(tmp_path / "teacher", quantization)
    student = convert(tmp_path / "teacher", **SHAPE)
    weights = student.state_dict()
    for name, expected in exact.items():
        assert torch.equal(weights[name], expected), name
    leader = [exact[f"model.layers.{i}.self_attn.k_proj.weight"].float() for i in (2, 3)]
    mean = (sum(leader) / 2).to(torch.bfloat16)  # type: ignore[union-attr]
    assert torch.equal(weights["model.layers.2.self_attn.k_proj_swiftkv.weight"], mean)
    assert not hasattr(student.config, "quantization_config")
    assert student(prompt[None]).logits.isfinite().all()
    student.save_pretrained(tmp_path / "in-memory")
    streamed = convert_checkpoint(tmp_path / "teacher", tmp_path / "streamed", **SHAPE).path
    assert (streamed / "teacher-00001-of-00001.safetensors").samefile(tmp_path / "teacher" / "model.safetensors")
    assert_equal(*(AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("streamed", "in-memory")))
    export(streamed, tmp_path / "export")
    with torch.no_grad():
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert torch.equal(exported(prompt[None]).logits, student(prompt[None]).logits)


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    save_fp8(tmp_path / "fp8", ROWS)
    rewrite(tmp_path / "fp8", lambda tensors: tensors.pop("model.layers.4.self_attn.k_proj.weight_scale"))
    with pytest.raises(ModelError, match=r"layers\.4\.self_attn\.k_proj\.weight is quantized but has no"):
        convert(tmp_path / "fp8", **SHAPE)


def test_a_configuration_of_the_reference_is_enough(prompt: torch.Tensor, tmp_path: Path) -> None:
    """The reference's config.json has none of our fields, and its `swiftkv` may be either value."""
    student = convert(random_teacher(attention_bias=True, tie_word_embeddings=True), **SHAPE)
    student.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["swiftkv"] is True
    assert {name: config[name] for name in SHAPE} == SHAPE
    for name in ("early_exit", "num_key_value_heads_swiftkv", "swiftkv_teacher_weights"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"swiftkv": False}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(prompt[None]).logits, student(prompt[None]).logits)
        assert torch.equal(loaded.swiftkv(False)(prompt[None]).logits, student.swiftkv(False)(prompt[None]).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["swiftkv"] is True


BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: t.pop("model.layers.4.mlp.up_proj.weight"), r"lacks 1 tensor .*layers\.4\.mlp\.up_proj"),
    "of an export": (lambda t: t.pop("model.layers.4.self_attn.k_proj.weight"), r"lacks 1 tensor .*self_attn\.k"),
    "added": (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), r"holds 1 tensor .*no place for.*layers\.9\.x"),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
        r"of another shape.*model\.norm\.weight is \[65\], not \[64\]",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("how", ["convert_checkpoint", "student"])
def test_tensors_that_do_not_fit_are_named(what: str, how: str, tmp_path: Path) -> None:
    change, message = BROKEN[what]
    path = tmp_path / "model"
    attempts: list[Any] = [lambda: AutoModelForCausalLM.from_pretrained(path)]
    if how != "student":
        attempts = [lambda: convert(path, **SHAPE), lambda: convert_checkpoint(path, tmp_path / "student", **SHAPE)]
    (convert(random_teacher(), **SHAPE) if how == "student" else random_teacher()).save_pretrained(path)
    rewrite(path, change)
    for attempt in attempts:
        with pytest.raises(ModelError, match=message):
            attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    save(random_teacher(), tmp_path / "teacher", max_shard_size="100KB")
    shard = sorted((tmp_path / "teacher").glob("*.safetensors"))[1]
    index = tmp_path / "teacher" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = shard.name
    index.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"lists model\.norm\.weight in .*, which does not contain it"):
        convert(tmp_path / "teacher", **SHAPE)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    model = save(random_teacher(), tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        convert(model, **SHAPE)


def test_outputs_in_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "precious").write_text("")
    for function in (convert_checkpoint, export):
        with pytest.raises(ConflictError, match="exists and is not empty"):
            function(tmp_path / "no-such-model", tmp_path / "output")
