"""Commands and code that the documentation shows, page by page."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```(?P<language>[a-z]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `not_run` is the reason that the comment above it gives, if there is one."""

    place: str
    language: str
    text: str
    not_run: str | None

    def commands(self) -> list[str]:
        """Commands to type: of a console what follows `$`, of a shell script every line that is no comment."""
        lines, shown = iter(self.text.splitlines()), []
        for line in lines:
            command = line.removeprefix("$ ") if self.language == "console" else line
            if command == line and self.language == "console":
                continue  # what was printed
            while not _whole(command):
                command += "\n" + next(lines)
            if shlex.split(command, comments=True):
                shown.append(command)
        return shown


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(f"{page}:{text[: found.start()].count(chr(10)) + 1}", found["language"], found["text"], found["reason"])
        for found in _BLOCK.finditer(text)
    ]


def _whole(command: str) -> bool:
    """Whether a shell would run it, instead of asking for another line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quotation that is not closed, or a backslash at the end
        return False
    return not command.endswith("\\")
