"""`swiftkv convert` and `swiftkv export` on real, tiny checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.fakes.peft import run_with_adapter, save_adapter
from tests.unit.cli.conftest import invoke as run

pytestmark = pytest.mark.slow("converts models")


def test_convert_then_export(tiny_teacher: Path, tmp_path: Path) -> None:
    student, served = tmp_path / "student", tmp_path / "served"
    result = run("convert", tiny_teacher, student, "-l", "2", "-g", "3", "--early-exit", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["output"] == str(student)
    assert document["num_kv_cache_layers"] == 4
    assert document["kv_bytes_ratio"] == 4 / 6
    (new,) = student.glob("swiftkv-*")
    assert document["new_bytes"] == new.stat().st_size - header_bytes(new)

    result = run("export", student, served, "--no-teacher", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "output": str(served),
        "teacher": False,
        "quantize": None,
        "weight_bytes": sum(path.stat().st_size for path in served.glob("*.safetensors")),
    }
    prompt = torch.arange(20)[None]
    whole, part = (AutoModelForCausalLM.from_pretrained(path) for path in (student, served))
    assert torch.equal(whole(prompt).logits, part(prompt).logits)
    assert part.num_parameters() < whole.num_parameters()


def test_a_peft_adapter_is_planned_and_converted(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.model.weights.bases.PEFT_CACHE", tmp_path / "cache")
    teacher = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    tensors = save_adapter(teacher, tmp_path / "lora", tiny_teacher)
    planned = [run("plan", model, "-l", "3", "--json") for model in (tmp_path / "lora", tiny_teacher)]
    assert planned[0].exit_code == 0, planned[0].output
    assert planned[0].stdout == planned[1].stdout
    result = run("convert", tmp_path / "lora", tmp_path / "student", "-l", "3", "--json")
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)  # the line about the merge is on stderr
    (line,) = result.stderr.splitlines()
    assert json.loads(line)["adapter"] == str(tmp_path / "lora")
    assert json.loads(line)["base"] == str(tiny_teacher)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval().swiftkv(False)
    prompt = torch.arange(20)[None]
    torch.testing.assert_close(
        student(prompt).logits, run_with_adapter(teacher.eval(), tensors, prompt), rtol=1e-4, atol=1e-4
    )


def test_prompts_bypass_layers(tiny_teacher: Path, tmp_path: Path) -> None:
    student = tmp_path / "student"
    result = run("convert", tiny_teacher, student, "--prefill-layers", "0-1,3", "--decode-key-value", "own")
    assert result.exit_code == 0, result.output
    assert "l = 4 of 6 layers, prompts run layers 0-1,3, g = 1" in result.stdout
    assert AutoModelForCausalLM.from_pretrained(student).config.layer_map.bypassed_layers == (2,)
    planned = json.loads(run("plan", student, "--json").output)
    assert planned["prefill_layers"] == [0, 1, 3]
    asked = run("plan", tiny_teacher, "-l", "3", "--prefill-layers", "0-1,3")
    assert "l = 4 (0-1,3), g = 1: " in asked.output
    assert asked.output.count("l = 3, g = 1") == 2, "once in a row and once in a sentence"


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_calibrated_on_text_or_with_other_heads(tiny_teacher: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Words to look at, one line after another.\n" * 50)
    assert run("convert", tiny_teacher, tmp_path / "copied", "--prefill-reduction", "0.5").exit_code == 0
    result = run("convert", tiny_teacher, tmp_path / "calibrated", "--calibration", text)
    assert result.exit_code == 0, result.output
    copied, calibrated = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("copied", "calibrated"))
    name = "model.layers.3.self_attn.k_proj_swiftkv.weight"
    assert not torch.equal(copied.state_dict()[name], calibrated.state_dict()[name])
    for target, options, said in (
        ("nearest", [], "int4. Weights are rounded to nearest"),
        ("rounded", ["--calibration", text, "--calibration-tokens", "500"], "projections in int4.\n"),
    ):
        result = run("export", tmp_path / "calibrated", tmp_path / target, "--quantize", "int4", *options)
        assert result.exit_code == 0, result.output
        assert said in result.stdout
    nearest, rounded = (AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("nearest", "rounded"))
    assert not torch.equal(nearest.state_dict()[name], rounded.state_dict()[name])
    result = run("convert", tiny_teacher, tmp_path / "mha", "-l", "2", "--sharing", "mha")
    assert "To match the KV cache size of gqa with g = 1, use --key-value-group-size 4 with mha." in result.stdout


def test_bad_input_is_one_message_and_leaves_nothing(tiny_teacher: Path, tmp_path: Path) -> None:
    for options, message in (
        (["-l", "6"], "1..5 are accepted"),
        (["-l", "2", "--prefill-reduction", "0.5"], "use either --num-key-value-layers or --prefill-reduction"),
        (["--prefill-layers", "0,2", "--decode-key-value", "shared"], "use swiftkv.decode_key_value: own"),
        (["--prefill-layers", "0;2"], "'0;2'; ascending layers and ranges are accepted, as 0-2,4,6-16"),
        (["--prefill-layers", "0,2", "-l", "2"], "which sets l to 3"),
        (["--calibration", "no-such-file.txt"], "no-such-file.txt"),
    ):
        result = run("convert", tiny_teacher, tmp_path / "student", *options)
        assert result.exit_code == 1
        assert message in result.stderr
        assert not list(tmp_path.iterdir())
    (tmp_path / "precious").write_text("")
    result = run("export", tiny_teacher, tmp_path, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stderr)["error"]["field"] == "output", "it is in use"


def test_an_adapter_and_a_whole_model_of_it(tiny_teacher: Path, tmp_path: Path) -> None:
    student, adapter, whole = tmp_path / "student", tmp_path / "adapter", tmp_path / "whole"
    assert run("convert", tiny_teacher, student, "-l", "2").exit_code == 0
    refused = run("export", student, adapter, "--adapter")
    assert refused.exit_code != 0
    assert "use --base TEACHER" in refused.output
    result = run("export", student, "--adapter", adapter, "--base", tiny_teacher, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["base"], document["replaced"], document["dropped"]) == (str(tiny_teacher.resolve()), 0, 0)
    assert document["weight_bytes"] < sum(path.stat().st_size for path in student.glob("*.safetensors")) / 2
    assert run("export", adapter, whole, "--teacher").exit_code == 0
    text = tmp_path / "text.txt"
    text.write_text("Words to round by, one line after another.\n" * 50)
    refused = run("export", student, tmp_path / "no", "--adapter", "--base", tiny_teacher, "--calibration", text)
    assert "which --adapter does not support" in refused.output
    rounded = run("export", adapter, tmp_path / "rounded", "--quantize", "mixed", "--calibration", text)
    assert rounded.exit_code == 0, rounded.output
    prompt = torch.arange(20)[None]
    expected, *found = (AutoModelForCausalLM.from_pretrained(path)(prompt).logits for path in (student, adapter, whole))
    assert all(torch.equal(expected, logits) for logits in found)
