"""Words that code, recipes, scripts and pages must not use, and the order of the glossary."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "diffmegatron",
    "configs",
    "launch",
    "tools/benchmarks",
)
ENDINGS = {".py", ".md", ".yaml", ".sh"}

# Each key is a pattern, which is matched without regard to case. The value has the words to write
# instead.
WORDS = {
    r"\banew\b": "again, from scratch, rebuilt",
    r"\barrived home\b": "was gathered, was returned",
    r"\bas ever\b": "as usual",
    r"\bbecame of\b|\bbecomes of\b": "happens to",
    r"\bdoubts?\b": "reason",
    r"\bdrowns?\b": "is lost in, is hidden by",
    r"\bfor good\b": "permanently, never removed",
    r"\bfutile\b": "no progress",
    r"\bgoes by\b": "uses, reads",
    r"(?<!for)\bgone\b": "removed, ended, lost, freed",
    r"\bhangs? on\b": "depends on",
    r"\bin the place of\b": "instead of, replaces",
    r"\bin vain\b": "without effect",
    r"\bis none (of|that)\b": "is not one of",
    r"\bjudgements?\b": "decision",
    r"\blearnt\b": "trained, learned",
    r"\bmend(s|ed|ing)?\b": "correct, fix, repair",
    r"\bpart(s)? (for ?ever|by what)\b": "diverge",
    r"\broom for\b|\bwith room\b": "space, memory",
    r"\brow.sums? D\b": "delta",
    r"\brubbish\b": "other bytes",
    r"\bstands? (at|beside|behind|there|twice|once)\b": "is, lies, is printed",
    r"\bstretch(es|ed)?\b": "range; of rotary embeddings: scaled",
    r"\bsuperfluous\b": "not needed",
    r"\btopolog(y|ies)\b": "parallel state, layout",
    r"\bturns? round\b": "is reversed",
    r"\btwins?\b": "baseline",
    r"\bwho does not come\b": "ranks that do not arrive",
    r"\bexchanges?d? (of|with) ranks\b": "context communication",
    r"\bchunks? (per|a) (stage|rank)\b|\bpipeline chunks?\b": "virtual stage",
    r"\bverdicts?\b|\bjudg(e|es|ed|ing)\b": "decision, decide (a judge is a model)",
}
# Files that may use the words of a pattern, because there they are technical terms.
ALLOWED = {
    # A judge is a model that decides whether a summary follows from its document.
    r"\bverdicts?\b|\bjudg(e|es|ed|ing)\b": {
        "docs/reference/suites.md",
        "diffmegatron/evaluation/judge.py",
        "diffmegatron/evaluation/judge_endpoint.py",
        "diffmegatron/evaluation/suites/hallucination.py",
    }
}


def files() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        for each in (path,) if path.is_file() else sorted(path.rglob("*")):
            # Skip pages of decisions and results, which describe the past and may use old words.
            if (
                each.suffix in ENDINGS
                and "design" not in each.parts
                and "results" not in each.parts
            ):
                yield each


@pytest.mark.parametrize("pattern", WORDS)
def test_banned_words_are_not_used(pattern):
    word = re.compile(pattern, re.IGNORECASE)
    allowed = ALLOWED.get(pattern, set())
    found = [
        f"{name}:{number}: {line.strip()}"
        for path in files()
        if (name := path.relative_to(ROOT).as_posix()) not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert not found, f"write instead: {WORDS[pattern]}\n" + "\n".join(found)


def test_every_allowed_place_still_uses_its_word():
    unused = [
        name
        for pattern, names in ALLOWED.items()
        for name in names
        if not re.search(pattern, (ROOT / name).read_text(), re.IGNORECASE)
    ]
    assert not unused, f"these files no longer use the word; remove them from ALLOWED: {unused}"


def test_the_glossary_is_in_order_and_names_each_word_once():
    words = re.findall(r"^\| (.+?) \|", GLOSSARY.read_text(), re.MULTILINE)
    words = [word.lower() for word in words if word not in ("word", "---")]
    assert words == sorted(set(words)), "words are not in alphabetical order, or one occurs twice"
