"""The printed install command names no package that a package index could have: the name there is another author's."""

import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv_platform import installing
from swiftkv_platform.installing import DISTRIBUTION, make_install_command, make_source_install_command

ROOT = Path(__file__).parents[2]


def test_the_command_adds_to_the_checkout_or_asks_for_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_install_command("train", "serve") == f"pip install -e '{ROOT}[train,serve]'"
    checkout = tmp_path / "it's mine"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(installing, "_REPOSITORY_ROOT", checkout)
    arguments = [
        sys.executable,
        "-c",
        "import shlex, sys; print(shlex.split(sys.argv[1])[-1])",
        make_install_command("eval"),
    ]
    assert subprocess.run(arguments, capture_output=True, text=True).stdout.strip() == f"{checkout}[eval]"
    monkeypatch.setattr(installing, "_REPOSITORY_ROOT", tmp_path)
    assert make_install_command("eval") == f"pip install '{DISTRIBUTION}[eval] @ git+URL_OF_ITS_REPOSITORY'"


def test_pip_refuses_the_placeholder() -> None:
    """The printed command names no package that a stranger could claim."""
    arguments = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        make_source_install_command("serve").split("'")[1],
    ]
    refused = subprocess.run([*arguments, "--no-index"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "Invalid" in refused.stderr or "git clone" in refused.stderr, refused.stderr
