"""The commands in the code blocks of README.md and of all pages in docs, as lists of words."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OTHER_LANGUAGE = re.compile(r"^```\w+\n.*?^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
# Values that replace the placeholders in the commands of the pages.
PLACEHOLDERS = {
    "RECIPE": "configs/diff_3b_1t.yaml",
    "FILE": "configs/clusters/example.yaml",
    "KEY=VALUE": "training.seed=1",
    "K/N": "1/8",
    "{}/64": "1/64",
    "SECONDS": "60",
}


class Command(NamedTuple):
    """Simple command on a page of the documentation.

    Attributes:
        page: path of the page from the root of the repository.
        program: program to run; for ``-m``, the module; for ``python FILE.py``, the file.
        words: arguments of the program.
        line: line of the page that contains the command.
    """

    page: str
    program: str
    words: list[str]
    line: str


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the commands that ``_ours`` accepts: of fenced blocks, then of indented blocks."""
    text = page.read_text()
    found = [(each.start(), each[1]) for each in FENCED.finditer(text)]
    rest = OTHER_LANGUAGE.sub("", FENCED.sub("", text))
    found += [(len(text) + each.start(), each[0]) for each in INDENTED.finditer(rest)]
    for _, block in sorted(found):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            for words in _simple_commands(line.strip()):
                if (
                    command := _ours(page.relative_to(ROOT).as_posix(), words, line.strip())
                ) is not None:
                    yield command


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Split a line at ``&&``, ``|`` and similar operators, and yield the words of each command.

    Comments are dropped, and the values in ``PLACEHOLDERS`` replace the placeholders.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # not a shell command
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("();<>|&"):
            yield command
            command = []
        else:
            # Brackets mark an optional word and dots a repeated word, so remove them. The brackets
            # of a list, KEY=[...], belong to its value.
            plain = word if "=[" in word else word.strip("[]").removesuffix("...")
            if plain not in ("", "OPTION"):
                command.append(PLACEHOLDERS.get(plain, plain))


def _ours(page: str, words: list[str], line: str) -> Command | None:
    """Return the command, or None if the tests cannot check its program."""
    while words and re.fullmatch(r"[A-Z_]+=\S*|\*(/\d+)?", words[0]):
        words = words[1:]
    if not words:
        return None
    if "-m" in words and words[0] in ("python", "torchrun"):
        at = words.index("-m") + 1
        return Command(page, words[at], words[at + 1 :], line)
    if words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        return Command(page, words[1], words[2:], line)
    if "diffmegatron" in words and words[0] in ("diffmegatron", "xargs"):
        at = words.index("diffmegatron")
        return Command(page, "diffmegatron", words[at + 1 :], line)
    if words[0] in ("make", "pytest", "cp", "sbatch") or words[0].startswith("launch/"):
        return Command(page, words[0], words[1:], line)
    return None
