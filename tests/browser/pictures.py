"""Pictures of the dashboard for the documentation, taken of one real run: `make pictures`.

Starts a separate platform, distills and deploys the built-in teacher, runs a sweep, lets one job fail at its gate and
another wait for a GPU that does not exist, and takes every picture that the page shows, which names the commit.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from swiftkv_platform.client import Client, Job
from swiftkv_platform.local.demo import COMPLETION_PROMPT, build_job_spec, convert_signals_to_exit
from swiftkv_platform.local.stack import Stack, StackOptions
from swiftkv_platform.settings import Settings
from tests.support.browsers import CHROMIUM, FLAGS

ROOT = Path(__file__).parents[2]
WIDTHS = {1280: 900, 390: 844}
SCHEMES = ("light", "dark")
SHOWN = {
    "overview": "The overview: a sweep runs, a job waits for a GPU that is not there, another failed at its gate",
    "overview-390-dark": "The same on a phone, dark",
    "new-job": "A new job from a recipe, with its plan",
    "job": "A job that has succeeded",
    "job-390": "The same on a phone",
    "metrics": "Its metrics",
    "checkpoints": "Its checkpoints",
    "model": "Its model",
    "sweep": "A sweep's frontier",
    "playground": "The student and its teacher, asked the same",
    "audit": "The audit trail",
}
"""Pictures that the documentation shows, with captions; a name without a width is 1280 pixels wide, light."""
BEGIN, END = "<!-- pictures: make pictures -->", "<!-- end of pictures -->"
_LARGEST = 150_000
_PATIENCE_MS = 900_000


@dataclass
class Camera:
    """Takes pictures of pages into `directory`."""

    page: Page
    url: str
    directory: Path
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, path: str, *, at: str | None = None, ready: Any = None) -> None:
        """Take picture `name` of the page at `path` after `ready(page)` returns; `at`: the heading to scroll to."""
        for width, height in WIDTHS.items():
            for scheme in SCHEMES:
                variant = name + (f"-{width}" if width != max(WIDTHS) else "") + ("-dark" if scheme == "dark" else "")
                if variant not in SHOWN:
                    continue
                self.page.set_viewport_size({"width": width, "height": height})
                self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
                self.page.goto(f"{self.url}/#/{path}")
                self.page.reload()
                self.page.locator("main h1").first.wait_for()
                self.page.wait_for_function("() => !document.querySelector('.skeleton')")
                if ready is not None:
                    ready(self.page)
                self.page.evaluate("scrollTo(0, 0)")
                if at is not None:
                    heading = self.page.locator("main h2", has_text=at).first
                    heading.evaluate("element => scrollTo(0, element.getBoundingClientRect().top + scrollY - 70)")
                self._write(self.directory / f"{variant}.png")
                self.taken.add(variant)

    def _write(self, file: Path) -> None:
        self.page.screenshot(path=file)
        with Image.open(file) as image:
            small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        small.save(file, optimize=True)
        if file.stat().st_size > _LARGEST:
            raise SystemExit(f"{file} is too large for the repository: {file.stat().st_size} bytes")


def spec(name: str, **parts: dict[str, Any]) -> dict[str, Any]:
    """Return the demo's job, cut down to minutes on two cores; `parts` change sections of its spec."""
    short: dict[str, dict[str, Any]] = {
        "data": {"max_length": 256, "sources": [{"name_or_path": "builtin:python-stdlib", "sample_count": 200}]},
        "swiftkv": {"calibration_tokens": 4096},
        "training": {"max_steps": 30, "batch_size": 8, "micro_batch_size": 4},
        "checkpoint": {"every_steps": 10, "keep": 4},
        "evaluation": {"max_tokens": 4096},
        "resources": {"num_workers": 1},
    }
    made = {**build_job_spec(None), "name": name}
    for changes in (short, parts):
        made |= {part: {**made.get(part, {}), **values} for part, values in changes.items()}
    return made


TEACHER_MODE = {"swiftkv": False}
FEW_STEPS = {"max_steps": 6, "batch_size": 8, "micro_batch_size": 4}


def run(client: Client, camera: Camera) -> list[str]:
    """Fill the platform, take the pictures, and return what happened, in sentences."""
    began = time.monotonic()
    student = _ended(
        client, client.jobs.create(spec("python-half", evaluation={"max_kl": 0.3, "min_top1_agreement": 0.7}))
    )
    client.models.promote(str(student.distilled_model), reason="the first student")
    chat = client.deployments.create(student.distilled_model, route_prefix="/student")
    failing = spec(
        "python-a-third", swiftkv={"prefill_reduction": 0.67}, evaluation={"max_kl": 0.05}, training=FEW_STEPS
    )
    _ended(client, client.jobs.create(failing), status="failed")
    client.deployments.wait_ready(chat.id)
    trials = {"num_key_value_layers": [9, 6], "key_value_group_size": [1, 2]}
    made = spec("python-sweep", sweep=trials, training=FEW_STEPS, evaluation={"max_perplexity_ratio": 1.25})
    for swept in ("prefill_reduction", "key_value_group_size"):
        del made["swiftkv"][swept]
    sweep = client.jobs.create(made)
    waiting = client.jobs.create(spec("python-on-a-gpu", resources={"num_workers": 1, "gpus_per_worker": 1}))
    _until(lambda: client.jobs.get(sweep.id).status == "running", "the sweep did not begin")
    _until(lambda: "waiting_for_resources" in str(client.jobs.get(waiting.id).status_reason), "no reason was given")
    with _asked(client, chat.id):
        camera.take("overview", "overview", ready=_rates)
    sweep = _ended(client, sweep)
    client.jobs.cancel(waiting.id)
    teacher = client.deployments.create(student.distilled_model, route_prefix="/teacher", engine=TEACHER_MODE)
    client.deployments.wait_ready(teacher.id)
    camera.take("job", f"jobs/{student.id}")
    camera.take("metrics", f"jobs/{student.id}?tab=metrics")
    camera.take("checkpoints", f"jobs/{student.id}?tab=checkpoints")
    camera.take("model", f"models/{student.distilled_model}")
    camera.take("sweep", f"jobs/{sweep.id}", at="Sweep")
    camera.take("new-job", "submit", ready=_planned)
    camera.take("playground", f"playground?a={chat.id}&b={teacher.id}", at="/student", ready=_answered)
    camera.take("audit", "audit")
    lacking = SHOWN.keys() - camera.taken
    if lacking:
        raise SystemExit(f"no picture was taken of {', '.join(sorted(lacking))}")
    result = student.result or {}
    return [
        f"The job of the pictures made {student.progress.step if student.progress else 0} steps"
        f" (KL {result['distilled']['kl']:.3f} nats, perplexity {result['distilled']['perplexity']:.2f} beside the"
        f" teacher's {result['teacher']['perplexity']:.2f}): too few to learn much, enough to show every page.",
        f"The whole run took {(time.monotonic() - began) / 60:.0f} minutes.",
    ]


def _ended(client: Client, job: Job, *, status: str = "succeeded") -> Job:
    job = client.jobs.wait(job.id)
    if job.status != status:
        raise SystemExit(f"{job.name} has {job.status}: {job.error}")
    print(f"{job.name} has {job.status}", flush=True)
    return job


def _until(condition: Any, otherwise: str, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(otherwise)
        time.sleep(0.5)


@contextmanager
def _asked(client: Client, deployment: str) -> Iterator[None]:
    """Send requests to a deployment during the block, so that its rates are not empty."""
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.2):
            list(client.deployments.generate(deployment, COMPLETION_PROMPT, max_tokens=24))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _rates(page: Page) -> None:
    page.get_by_text(re.compile(r"TTFT [\d.,]+ ms")).first.wait_for()


def _planned(page: Page) -> None:
    page.get_by_label("Start from").select_option("recipe:builtin-python-5m")
    page.get_by_label("Plan", exact=True).get_by_text("valid", exact=True).wait_for()


def _answered(page: Page) -> None:
    page.get_by_label("Kind").select_option("text")
    page.get_by_label("Prompt").fill(COMPLETION_PROMPT)
    page.get_by_label("Max tokens").fill("64")
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("button", name="New conversation").wait_for()


def _commit() -> str:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "swiftkv_platform", "tests/browser/pictures.py")
    return git("log", "-1", "--format=%h of %as") + (" with changes" if changed else "")


def write_pictures(page: Path, commit: str, happened: list[str]) -> None:
    """Write the pictures, and where they come from, between the markers of `page`."""
    about = f"`make pictures` took these at commit {commit}, of a real run on a CPU."
    about += " Times in them are no measurements."
    lines = [BEGIN, "", textwrap.fill(" ".join([about, *happened]), 150)]
    for name, words in SHOWN.items():
        lines += ["", f"{words}:", "", f"![](pictures/{name}.png)"]
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{page} lacks the lines {BEGIN} and {END}"
    page.write_text(before + "\n".join([*lines, "", end]) + after, encoding="utf-8")


def main() -> None:
    shown = ROOT / "docs" / "pictures"
    shown.mkdir(exist_ok=True)
    with (
        convert_signals_to_exit(),
        tempfile.TemporaryDirectory(prefix="pictures-") as home,
        sync_playwright() as driver,
    ):
        stack = Stack(Settings(home=Path(home), database_url=None, storage_uri=None))
        browser = driver.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False, args=FLAGS)
        try:
            state = stack.up(StackOptions(port=0), print)
            page = browser.new_page()
            page.set_default_timeout(_PATIENCE_MS)
            with Client(state.url, serve_url=state.serve_url) as client:
                happened = run(client, Camera(page, state.url, shown))
        finally:
            browser.close()
            stack.down()
    write_pictures(ROOT / "docs" / "quickstart.md", _commit(), happened)
    sizes = {file.name: file.stat().st_size for file in sorted(shown.glob("*.png"))}
    print(json.dumps(sizes, indent=2))


if __name__ == "__main__":
    main()
