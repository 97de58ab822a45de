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
    """A fenced block of a page; `not_run`: the reason not to run it, from the comment above it, if any."""

    place: str
    language: str
    text: str
    not_run: str | None

    def commands(self) -> list[str]:
        """Return the commands to type: after `$` in a console, every line that is no comment in a shell script."""
        lines, shown = iter(self.text.splitlines()), []
        for line in lines:
            command = line.removeprefix("$ ") if self.language == "console" else line
            if command == line and self.language == "console":
                continue  # output
            while not _whole(command):
                command += "\n" + next(lines)
            if shlex.split(command, comments=True):
                shown.append(command)
        return shown


def blocks(page: Path) -> list[Block]:
    """Return the page's fenced blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(f"{page}:{text[: found.start()].count(chr(10)) + 1}", found["language"], found["text"], found["reason"])
        for found in _BLOCK.finditer(text)
    ]


def _whole(command: str) -> bool:
    """Whether a shell would run the command rather than ask for another line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:  # an open quotation, or a backslash at the end
        return False
    return not command.endswith("\\")
