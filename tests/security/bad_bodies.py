"""Bodies that no caller sends in good faith, as raw JSON, each with the field that the refusal is to name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BadBody:
    name: str
    raw: str | bytes
    field: str | None
    """None: the body as a whole, where it is no JSON at all."""

    @property
    def content(self) -> bytes:
        return self.raw if isinstance(self.raw, bytes) else self.raw.encode()


def spec(fields: str) -> str:
    """A spec that is accepted but for `fields`."""
    return '{"name": "test", "model": {"name_or_path": "org/teacher"}, ' + fields + "}"


_DIGITS = "1" + "0" * 400

SPECS = (
    BadBody("a lone surrogate", spec(r'"metadata": {"a": "\ud800"}'), "metadata.a"),
    BadBody("a lone low surrogate", spec(r'"metadata": {"a": "x\uDFFFy"}'), "metadata.a"),
    BadBody("two high surrogates", spec(r'"metadata": {"a": "\ud83d\ud83d"}'), "metadata.a"),
    BadBody("a key that is a surrogate", spec(r'"metadata": {"\ud800": "a"}'), r"metadata.\ud800"),
    BadBody("an unknown key that is a surrogate", spec(r'"\ud800": 1'), r"\ud800"),
    BadBody("NUL", spec(r'"metadata": {"a": "x\u0000y"}'), "metadata.a"),
    BadBody("a key with NUL", spec(r'"metadata": {"x\u0000y": "a"}'), r"metadata.x\x00y"),
    BadBody(
        "a surrogate in a list", spec(r'"tracking": {"wandb": {"tags": ["a", "\udc00"]}}'), "tracking.wandb.tags[1]"
    ),
    BadBody("400 digits", spec(f'"training": {{"max_steps": {_DIGITS}}}'), "training.max_steps"),
    BadBody("5,000 digits", spec(f'"training": {{"max_steps": 1{"0" * 5000}}}'), "training.max_steps"),
    BadBody("2 to the 63rd", spec('"training": {"max_steps": 9223372036854775808}'), "training.max_steps"),
    BadBody("63 bits", spec('"training": {"max_steps": 9223372036854775807}'), "training.max_steps"),
    BadBody("a seed beyond 63 bits", spec('"training": {"seed": -9223372036854775809}'), "training.seed"),
    BadBody(
        "a layer beyond 63 bits",
        spec(f'"distillation": {{"hidden_loss_layer": -{_DIGITS}}}'),
        "distillation.hidden_loss_layer",
    ),
    BadBody("NaN", spec('"optimizer": {"learning_rate": NaN}'), "optimizer.learning_rate"),
    BadBody("Infinity", spec('"limits": {"cost_cap": Infinity}'), "limits.cost_cap"),
    BadBody("a float that overflows", spec('"optimizer": {"learning_rate": 1e999}'), "optimizer.learning_rate"),
    BadBody("a long name of a model", spec(f'"model": {{"name_or_path": "{"x" * 5000}"}}'), "model.name_or_path"),
    BadBody(
        "a long name of data",
        spec(f'"data": {{"sources": [{{"name_or_path": "{"x" * 5000}"}}]}}'),
        "data.sources[0].name_or_path",
    ),
    BadBody(
        "a long name of a task",
        spec(f'"evaluation": {{"tasks": [{{"name": "{"x" * 5000}"}}]}}'),
        "evaluation.tasks[0].name",
    ),
    BadBody(
        "a long accelerator", spec(f'"resources": {{"accelerator_type": "{"x" * 5000}"}}'), "resources.accelerator_type"
    ),
    BadBody(
        "a long project", spec(f'"tracking": {{"wandb": {{"project": "{"x" * 5000}"}}}}'), "tracking.wandb.project"
    ),
    BadBody("a long metadata key", spec(f'"metadata": {{"{"x" * 500}": "a"}}'), "metadata"),
    BadBody("a quoted metadata key", spec(r'"metadata": {"a\"b": "a"}'), "metadata"),
    BadBody("a long metadata value", spec(f'"metadata": {{"a": "{"x" * 50_000}"}}'), "metadata.a"),
    BadBody("a long unknown key", spec(f'"{"x" * 5000}": 1'), "x" * 64),
    BadBody("1e8 workers", spec('"resources": {"num_workers": 100000000}'), "resources.num_workers"),
    BadBody("1e12 workers", spec('"resources": {"num_workers": 1000000000000}'), "resources.num_workers"),
    BadBody(
        "1e8 elastic workers",
        spec('"resources": {"num_workers": {"min": 1, "max": 100000000}}'),
        "resources.num_workers.max",
    ),
    BadBody("a huge batch", spec('"training": {"batch_size": 1000000000}'), "training.batch_size"),
    BadBody(
        "an unknown key in a union",
        spec('"evaluation": {"tasks": [{"name": "x", "zzz": 1}]}'),
        "evaluation.tasks[0].zzz",
    ),
    BadBody(
        "an unknown key in an elastic size",
        spec('"resources": {"num_workers": {"min": 1, "max": 2, "zzz": 1}}'),
        "resources.num_workers.zzz",
    ),
    BadBody("depth", spec('"metadata": {"a": ' + "[" * 150 + "]" * 150 + "}"), "metadata.a"),
    BadBody("great depth", "[" * 200_000 + "]" * 200_000, "body"),
    BadBody("no UTF-8", b'{"name": "\xed\xa0\x80"}', "body"),
    BadBody("nothing but a string", r'"\ud800"', "body"),
)
"""Refused by `POST /jobs` and `POST /jobs/validate`."""
