"""No text tells a reader to install this project by its name: on a package index the name is another author's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from swiftkv_platform import installing
from swiftkv_platform.installing import DISTRIBUTION, install_command, install_from_source

ROOT = Path(__file__).parents[2]
INSTALLS = re.compile(
    r"\b(?:pip3?|pipx|uvx?|conda|mamba|poetry|pdm|hatch)\b[^`#;&|]*?"
    r"\b(?:install|download|add|run|sync|wheel)\b([^`#;&|]*)"
)
REQUIREMENT = re.compile(
    r"(?<![\w./{-])swiftkv[-_.\w]*+(?:\[[^\]]*\])?+(?!\S*/)(?! @ (?:git\+|\{))",
    re.IGNORECASE,
)
"""Matches a distribution's name that begins like this project's, unless a path or an address follows."""
IMAGE = re.compile(r"^\s*image: *(?!registry\.(?:invalid|example))\S*swiftkv\S*$", re.MULTILINE)


def named(text: str) -> list[str]:
    """Names of this project that the text's commands would install from an index."""
    joined = text.replace("\\\n", " ")
    return [
        name for line in joined.splitlines() for rest in INSTALLS.findall(line) for name in REQUIREMENT.findall(rest)
    ]


def texts() -> dict[str, str]:
    """Texts of the repository's files, except this one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {}
    for name in listed.splitlines():
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            found[name] = path.read_bytes().decode("utf-8", errors="ignore")
    return found


def test_commands_that_take_the_name_from_an_index_are_told_from_those_that_name_a_source() -> None:
    from_an_index = (
        "use pip install 'swiftkv-platform[eval]'",
        "python -m pip install --upgrade SwiftKV_Platform==0.1.0",
        "pip install 'ray[llm]==2.60.0' 'swiftkv-platform[vllm]'  # for GPUs",
        "RUN pip install --no-cache-dir \\\n  swiftkv-platform",
        "uv pip install swiftkv-vllm",
        "uvx run swiftkv-platform",
    )
    from_a_source = (
        install_from_source("serve"),
        "pip install -e '/src/swiftkv_platform[train,serve]'",
        "pip install '.[vllm]'  # in a clone; then swiftkv serve",
        "pip uninstall --yes swiftkv-platform",
    )
    assert [len(named(line)) for line in (*from_an_index, *from_a_source)] == [1] * 6 + [0] * 4


def test_no_file_tells_to_install_it_from_an_index() -> None:
    found = {name: named(text) for name, text in texts().items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_local_images_are_built_and_never_pulled() -> None:
    services = yaml.safe_load((ROOT / "infra/compose.yaml").read_text())["services"]
    ours = {name: each for name, each in services.items() if each["image"].startswith("swiftkv")}
    assert len(ours) >= 3
    assert {name: each.get("pull_policy") for name, each in ours.items()} == dict.fromkeys(ours, "build")
    elsewhere = {name: IMAGE.findall(text) for name, text in texts().items() if name != "infra/compose.yaml"}
    assert {name: lines for name, lines in elsewhere.items() if lines} == {}


def test_the_command_adds_to_the_checkout_or_asks_for_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_command("train", "serve") == f"pip install -e '{ROOT}[train,serve]'"
    checkout = tmp_path / "it's mine"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(installing, "_CHECKOUT", checkout)
    arguments = [
        sys.executable,
        "-c",
        "import shlex, sys; print(shlex.split(sys.argv[1])[-1])",
        install_command("eval"),
    ]
    assert subprocess.run(arguments, capture_output=True, text=True).stdout.strip() == f"{checkout}[eval]"
    monkeypatch.setattr(installing, "_CHECKOUT", tmp_path)
    assert install_command("eval") == f"pip install '{DISTRIBUTION}[eval] @ git+URL_OF_ITS_REPOSITORY'"


def test_pip_refuses_the_placeholder() -> None:
    """The printed command names no package that a stranger could claim."""
    arguments = [sys.executable, "-m", "pip", "download", "--no-deps", install_from_source("serve").split("'")[1]]
    refused = subprocess.run([*arguments, "--no-index"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "Invalid" in refused.stderr or "git clone" in refused.stderr, refused.stderr
