"""Follow README and the pages of docs/ from top to bottom as a reader would, with the ids of this run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from swiftkv_platform.client import Client
from swiftkv_platform.local.stack import RunDirectory, StackState, find_marked_processes
from tests.contract.serving.replicas import save_chat_model
from tests.support.documented import Block, blocks
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.soak("types whole pages, minutes"), pytest.mark.timeout(3600)]

SMALL: dict[str, Any] = {
    "data": {"max_length": 128, "sources": [{"name_or_path": "builtin:python-stdlib", "sample_count": 40}]},
    "training": {"max_steps": 4, "batch_size": 4, "micro_batch_size": 2},
    "resources": {"num_workers": 1},
    "evaluation": {"max_tokens": 1024},
}
"""Sections of documented jobs that are replaced by smaller ones; everything else runs as documented."""
NAME = '"my-first-student"'
RECIPE = "--recipe builtin-python-5m"
ACTIVATE = "source .venv/bin/activate"


@dataclass
class Reader:
    """A user with a working directory for commands and a home for the platform."""

    directory: Path
    fresh: bool = False
    """Run each command in a new shell, which finds the platform only as README describes."""

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SWIFTKV_"))}
        path = "/usr/bin:/bin" if self.fresh else f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**inherited, "PATH": path, "SWIFTKV_HOME": str(self.home), "HOME": str(self.directory)}

    def platform(self) -> StackState:
        state = RunDirectory(self.home).load()
        assert state is not None, "the page has not started the platform yet"
        return state

    def follow(self, block: Block) -> list[str]:
        """Run a block, and return the outputs of its commands or code."""
        match block.language:
            case "yaml":
                (self.directory / "spec.yaml").write_text(yaml.safe_dump(yaml.safe_load(block.text) | SMALL))
            case "python":
                return [self.printed([sys.executable, "-c", self.own(block.text)], block.place)]
            case "console" | "bash":
                return [self.type(command, block.place) for command in block.commands()]
        return []

    def type(self, command: str, place: str) -> str:
        if command.startswith("curl"):
            command = command.replace("curl", "curl --fail-with-body", 1)
        begin = f"{ACTIVATE} && " if self.fresh else ""
        return self.printed(["bash", "-c", begin + self.own(command)], place)

    def printed(self, command: list[str], place: str) -> str:
        done = subprocess.run(command, cwd=self.directory, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{place}: {command[-1]}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def own(self, text: str) -> str:
        """Return the text with this platform's addresses and newest ids, and with smaller jobs."""
        text = text.replace(NAME, f"{NAME}, {json.dumps(SMALL)[1:-1]}")
        options = [
            f"--set {section}.{field}='{json.dumps(value)}'"
            for section, fields in SMALL.items()
            for field, value in fields.items()
        ]
        text = text.replace(RECIPE, " ".join([RECIPE, *options]))
        if not re.search(r"localhost|127\.0\.0\.1|_\.\.\.|mdl_other", text):
            return text
        state = self.platform()
        with Client(state.url) as client:
            jobs, models, deployments = client.jobs.list(), client.models.list(), client.deployments.list()
        served = deployments[0].model if deployments else None
        ids = [("job_...", job.id) for job in jobs if job.status == "succeeded"]
        ids += [("dep_...", deployment.id) for deployment in deployments]
        ids += [("mdl_other", model.id) for model in models if model.id != served]
        ids += [("mdl_...", served or model.id) for model in models]
        addresses = {"http://127.0.0.1:8000": state.url, "localhost:8000": state.url, "localhost:8001": state.serve_url}
        for shown, own in (*ids, *addresses.items()):
            text = text.replace(shown, own)
        return text


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with running(Reader(tmp_path_factory.mktemp("reader"))) as reader:
        yield reader


@contextmanager
def running(reader: Reader) -> Iterator[Reader]:
    """Yield the reader, and stop its platform at the end."""
    try:
        yield reader
    finally:
        subprocess.run([Path(sys.executable).parent / "swiftkv", "down"], env=reader.environment, check=True)
    assert find_marked_processes(str(reader.home)) == []


def run(reader: Reader, page: str) -> list[str]:
    """Run every block of the page that is not marked as not run; return the outputs in order."""
    return [output for block in blocks(Path(page)) if not block.not_run for output in reader.follow(block)]


def test_the_quickstart_from_top_to_bottom(reader: Reader) -> None:
    run(reader, "docs/quickstart.md")
    report = json.loads((reader.directory / "student" / "evaluation.json").read_text())
    assert report["distilled"]["kl"] > 0
    with Client(reader.platform().url) as client:
        posted, *others = client.jobs.list()
        assert [job.status for job in others] == ["succeeded"] * 2
        client.jobs.cancel(posted.id)
        for deployment in client.deployments.list():
            client.deployments.delete(deployment.id)


def test_the_serving_page_from_top_to_bottom(reader: Reader) -> None:
    outputs = run(reader, "docs/serving.md")
    completion, chat, response, message = [json.loads(output) for output in outputs if output.startswith("{")]
    assert completion["choices"][0]["text"] in ("yes", "no")
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    assert (response["object"], message["type"]) == ("response", "message")


def test_the_section_from_traffic_to_a_better_student(tmp_path: Path) -> None:
    section = Path("docs/training.md").read_text().partition("### From traffic")[2].partition("\n### ")[0]
    (tmp_path / "section.md").write_text(section)
    spec, commands = blocks(tmp_path / "section.md")
    capture, submit, *others = commands.commands()
    with running(Reader(tmp_path)) as reader:
        reader.type(f"swiftkv up && swiftkv jobs submit {RECIPE} --follow", "the first student")
        reader.type("swiftkv deploy mdl_...", "the first student")
        reader.type(capture, commands.place)
        with Client(reader.platform().url) as client:
            [deployment] = client.deployments.list()
            for number in range(160):
                prompt = f"def test_release_{number}(self):\n    self.assertEqual(parse('{number % 7}.{number}'),"
                body = {"prompt": prompt, "max_tokens": 32, "stop": ["\n"], "temperature": 0.0}
                httpx.post(f"{deployment.url}/generate", json=body, trust_env=False).raise_for_status()
            loop = yaml.safe_load(reader.own(spec.text))
            loop["training"] |= {"batch_size": 4, "micro_batch_size": 4, "max_steps": 30}
            del loop["training"]["num_epochs"]
            loop["data"]["sources"][0]["complete"]["max_tokens"] = 32
            loop |= {"optimizer": {"learning_rate": 1e-3}, "resources": {"num_workers": 1}}
            (tmp_path / "loop.yaml").write_text(yaml.safe_dump(loop))
            reader.type(submit, commands.place)
            new, served = client.models.list()
            wait_for_candidate(client, deployment.id)
            compared, rollouts, rolled_back = [reader.type(command, commands.place) for command in others]
            assert served.id in compared
            assert new.id in compared
            assert "candidate" in rollouts
            assert rolled_back.startswith("Rolled back the rollout of")
            assert client.deployments.get(deployment.id).model == served.id


def wait_for_candidate(client: Client, deployment_id: str) -> None:
    def has_candidate() -> bool:
        [rollout] = client.deployments.rollouts(deployment_id)
        return bool(rollout.status == "candidate")

    eventually(has_candidate, "the new model is the candidate", seconds=180.0)


def test_a_model_of_ones_own_from_top_to_bottom(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    save_llama(tmp_path / "my-llama")
    save_chats(tmp_path / "chats.jsonl")
    shown = [block for block in blocks(Path("docs/your-model.md")) if not block.not_run]
    [ask] = [block for block in shown if block.language == "python"]
    for block in shown:
        if block is not ask:
            reader.follow(block)
    assert json.loads((tmp_path / "student" / "evaluation.json").read_text())["distilled"]["kl"] < 1
    with serving(reader) as url:
        reader.printed([sys.executable, "-c", ask.text.replace("http://127.0.0.1:8080", url)], ask.place)


def test_readme_in_fresh_shells(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    save_llama(tmp_path / "DIR")
    save_chats(tmp_path / "chats.jsonl")
    alone, *others = [block for block in blocks(Path("README.md")) if not block.not_run]
    activate, distill, serve = [command.partition("#")[0].strip() for command in alone.commands()]
    assert (activate, serve) == (ACTIVATE, "swiftkv serve student")
    with running(Reader(tmp_path, fresh=True)) as reader:
        reader.type(distill, alone.place)
        with serving(reader):
            pass
        for block in others:
            reader.follow(block)
        with Client(reader.platform().url) as client:
            paths = [urlsplit(each.url or "").path.rstrip("/") for each in client.deployments.list()]
            assert sorted(paths) == ["", "/second"]


@contextmanager
def serving(reader: Reader) -> Iterator[str]:
    """Run `swiftkv serve student` on a free port, and yield its address."""
    command = [Path(sys.executable).parent / "swiftkv", "serve", "student", "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=reader.directory, env=reader.environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def save_chats(file: Path) -> None:
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    chats = [[words[i % 9 :], words[: i % 7 + 2]] for i in range(200)]
    file.write_text(
        "".join(
            json.dumps({"messages": [{"role": role, "content": f"{' '.join(part)} {i}"} for role, part in turn]}) + "\n"
            for i, turn in enumerate([("user", asked), ("assistant", said)] for asked, said in chats)
        )
    )


def save_llama(directory: Path) -> None:
    """Save a random Llama of four layers, with a tokenizer and a chat template."""
    save_chat_model(directory, 512, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    shutil.rmtree(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def test_only_what_installs_or_needs_a_control_plane_is_marked_as_not_run() -> None:
    pages = [Path(name) for name in ("README.md", "docs/quickstart.md", "docs/serving.md", "docs/your-model.md")]
    not_run = [block for page in pages for block in blocks(page) if block.not_run]
    commands = [command.partition("  #")[0].rstrip() for block in not_run for command in block.commands()]
    install = "make install && source .venv/bin/activate"
    brought_in = ["swiftkv models import student", "swiftkv deploy mdl_..."]
    assert commands == ["make demo", "make demo", install, install, "swiftkv serve student", *brought_in]
