"""Tests of the exported tokenizer against tiktoken, which encodes the training data."""

import json
import os
import shutil
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from diffmegatron.data.tokenizers import CL100K_PATTERN, TiktokenTokenizer, load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.hf import tokenizer as hf_tokenizer
from diffmegatron.hf.tokenizer import (
    check_converted_tokenizer,
    convert,
    oniguruma_pattern,
    write_tokenizer,
)
from tests.paths import ROOT

CL100K_FILE = ROOT.parent / "shared" / "data" / "cl100k_base.tiktoken"
SPECIAL = {"<|endoftext|>": 300, "<|one|>": 290, "<|two|>": 310}
MERGED = [
    b"th",
    b"the",
    b" t",
    b" the",
    b"in",
    b"ing",
    b"12",
    b"123",
    b"1234",
    b"\n\n",
    b"\xc3\xbc",
]
# The texts combine these pieces with arbitrary characters. The pieces are from code and prose, or
# are characters that tokenizers treat in special ways.
PIECES = st.sampled_from(
    ["1234", " the", "ing", "\n", "\n\n", " ", "  ", "\t", "\r\n", "'S", "'\u017f", "é", "e\u0301"]
)
TEXT = st.lists(st.one_of(PIECES, st.characters(exclude_categories=["Cs"])), max_size=30)


@pytest.fixture(scope="module")
def small() -> TiktokenTokenizer:
    """Return a tokenizer with cl100k_base's pattern, few merges, and unused ids before specials."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {token: 256 + rank for rank, token in enumerate(MERGED)}
    encoding = tiktoken.Encoding(
        "small", pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL
    )
    return TiktokenTokenizer("small", encoding, SPECIAL["<|endoftext|>"])


@pytest.fixture(scope="module")
def converted(small: TiktokenTokenizer) -> Tokenizer:
    return convert(small.encoding)


@pytest.fixture(scope="module")
def cl100k() -> TiktokenTokenizer:
    if not CL100K_FILE.exists():
        pytest.skip("cl100k_base.tiktoken, the file of its ranks, is not on this machine")
    loaded = load_tokenizer(str(CL100K_FILE))
    assert isinstance(loaded, TiktokenTokenizer)
    return loaded


@pytest.fixture(scope="module")
def exported_cl100k(
    cl100k: TiktokenTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("cl100k")
    write_tokenizer(cl100k, 4096, folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_special_tokens_keep_their_ids_over_gaps(small: TiktokenTokenizer, tmp_path: Path) -> None:
    write_tokenizer(small, 128, tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert {token: exported.convert_tokens_to_ids(token) for token in SPECIAL} == SPECIAL
    assert exported("in<|one|>the<|endoftext|>").input_ids == [260, 290, 257, 300]
    assert exported.eos_token_id == exported.bos_token_id == exported.pad_token_id == 300
    assert exported.model_max_length == 128
    assert exported.decode([260, 290, 257], skip_special_tokens=True) == "inthe"


@settings(max_examples=200)
@given(pieces=TEXT)
def test_merges_follow_tiktoken(
    small: TiktokenTokenizer, converted: Tokenizer, pieces: list[str]
) -> None:
    text = "".join(pieces)
    assert converted.encode(text).ids == small.encoding.encode(text, allowed_special="all")


@pytest.mark.parametrize(
    ("pattern", "translated"),
    [
        (r"\p{N}{1,3}+", r"(?>\p{N}{1,3})"),
        (r"a|[^]\w{2}]{2}+b", r"a|(?>[^]\w{2}]{2})b"),
        (r"x(?:a(b|\)))?(c){2,}+d", r"x(?:a(b|\)))?(?>(c){2,})d"),
        (r"x(a(b)){1,2}+|\s++$|^y", r"x(?>(a(b)){1,2})|\s++\z|\Ay"),
        (r"[$^]\$\^ ?+a*+\p{N}{1,3}", r"[$^]\$\^ ?+a*+\p{N}{1,3}"),
    ],
)
def test_pattern_is_translated(pattern: str, translated: str) -> None:
    assert oniguruma_pattern(pattern) == translated


def test_only_the_translated_pattern_splits_correctly() -> None:
    def split(pattern: str) -> list[str]:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        return [piece for piece, _ in cut.pre_tokenize_str("1234567 ab\nab")]

    assert split(oniguruma_pattern(r"\p{N}{1,3}+|ab$")) == ["123", "456", "7", " ab\n", "ab"]
    assert split(r"\p{N}{1,3}+|ab$") == ["1234567", " ", "ab", "\n", "ab"]


def test_pattern_left_as_it_is_fails_the_check(
    small: TiktokenTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_tokenizer, "oniguruma_pattern", lambda pattern: pattern)
    with pytest.raises(
        UserError, match=r"other ids than the encoding 'small'.*WE'LL.*\[264.*at place 75"
    ):
        write_tokenizer(small, 128, tmp_path)


def test_check_notices_a_changed_file(small: TiktokenTokenizer, tmp_path: Path) -> None:
    write_tokenizer(small, 128, tmp_path)
    for change in ({"decoder": {"type": "Fuse"}}, {"normalizer": {"type": "NFC"}}):
        folder = tmp_path / next(iter(change))
        folder.mkdir()
        shutil.copy(tmp_path / "tokenizer_config.json", folder)
        content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps(content | change))
        with pytest.raises(UserError, match="cannot be exported exactly"):
            check_converted_tokenizer(small.encoding, folder)


def test_cl100k_has_its_ids(
    cl100k: TiktokenTokenizer, exported_cl100k: PreTrainedTokenizerBase
) -> None:
    assert exported_cl100k("<|endoftext|>Hello world<|endofprompt|>").input_ids == [
        *(100257, 9906, 1917, 100276)
    ]
    every = range(0, 100_256, 7)
    texts = [cl100k.encoding.decode([token]) for token in every]
    ids = exported_cl100k(texts).input_ids
    assert ids == [cl100k.encoding.encode_ordinary(text) for text in texts]


def test_cl100k_matches_tiktoken_on_source_files(
    cl100k: TiktokenTokenizer, exported_cl100k: PreTrainedTokenizerBase
) -> None:
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40]:
        text = path.read_text(encoding="utf-8")
        ids = exported_cl100k(text, verbose=False).input_ids
        assert ids == cl100k.encoding.encode_ordinary(text), path.name
        assert exported_cl100k.decode(ids) == text, path.name


@settings(max_examples=300)
@given(pieces=TEXT)
def test_cl100k_matches_tiktoken_on_any_text(
    cl100k: TiktokenTokenizer, exported_cl100k: PreTrainedTokenizerBase, pieces: list[str]
) -> None:
    text = "".join(pieces)
    ids = exported_cl100k(text).input_ids
    assert ids == cl100k.encoding.encode(text, allowed_special="all")
    assert exported_cl100k.decode(ids) == text


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_copied_tokenizer_gives_the_ids_of_training_or_a_warning(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check the ids of an exported copy of a folder that names Qwen2's tokenizer class.

    In transformers 5, this class normalizes texts, so its ids differ from those of training. With
    model_type llama, the export names another class, and the ids are those of training. With
    model_type qwen2, a warning is logged.
    """
    folder, out = tmp_path / "folder", tmp_path / "out"
    for path in (folder, out):
        path.mkdir()
    write_tokenizer(load_tokenizer("bytes"), 64, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": ["x.X", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    AutoConfig.for_model(model_type).save_pretrained(out)
    trained = load_tokenizer(str(folder))
    write_tokenizer(trained, 64, out)
    assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_text())
    exported = AutoTokenizer.from_pretrained(out, local_files_only=True)
    given = [exported(text).input_ids for text in hf_tokenizer.SAMPLE]
    is_equal = given == [trained.encode(text).tolist() for text in hf_tokenizer.SAMPLE]
    # For model_type qwen2, transformers 5 uses Qwen2's class, whatever class the export names.
    assert is_equal == (model_type == "llama")
    assert ("AutoTokenizer gives other ids than training" in caplog.text) != is_equal
    plain = PreTrainedTokenizerFast.from_pretrained(out)
    for text in hf_tokenizer.SAMPLE:
        assert plain(text).input_ids == trained.encode(text).tolist()
