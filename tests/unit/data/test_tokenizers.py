"""Tests of ``load_tokenizer``: token ids, hashes, and errors for damaged or missing files."""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data import tokenizers as module
from diffmegatron.data.tokenizers import (
    EncodeError,
    Tokenizer,
    encode_whole_texts,
    explain_library_errors,
    find_cl100k,
    load_tokenizer,
)
from diffmegatron.errors import UserError
from diffmegatron.hf.chat_template import load_exported
from tests.paths import ROOT

SHARED = ROOT.parent / "shared" / "data"
TEXT = "def f(x):\n\treturn  x**2  # naïve 数学 🙂\r\n\n<|endoftext|> 12345   it's IT'S"


@pytest.fixture
def cl100k(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    if (SHARED / "cl100k_base.tiktoken").exists():
        monkeypatch.setenv("DIFFMEGATRON_TIKTOKEN", str(SHARED))
    try:
        find_cl100k()
    except UserError as error:
        pytest.skip(str(error))
    return load_tokenizer("cl100k_base")


def test_bytes_are_the_utf8_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(TEXT).tolist() == list(TEXT.encode())
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


def test_the_hash_of_bytes_does_not_change() -> None:
    assert load_tokenizer("bytes").sha256.startswith("0b90cd8645a0b261")


def test_cl100k_is_the_published_encoding(
    cl100k: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / module.CL100K_CACHE_NAME).write_bytes(find_cl100k().read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    published = tiktoken.get_encoding("cl100k_base")
    source = Path(module.__file__).read_text()
    for text in (TEXT, source, source[::-1], " \n\t \r\n" * 50, "a" * 300, "١٢٣٤ é́ ﬃ"):
        assert cl100k.encode(text).tolist() == published.encode(text, disallowed_special=())
    assert cl100k.vocab_size == published.n_vocab == 100277
    assert cl100k.end_of_document == published.eot_token


def test_special_text_is_ordinary_text(cl100k: Tokenizer) -> None:
    ids = cl100k.encode("<|endoftext|>")
    assert cl100k.end_of_document not in ids and len(ids) > 1
    assert cl100k.decode(ids) == "<|endoftext|>"
    assert cl100k.decode([cl100k.end_of_document]) == "<|endoftext|>"


def test_a_renamed_cl100k_file_has_the_same_hash(cl100k: Tokenizer, tmp_path: Path) -> None:
    copy = tmp_path / "renamed.tiktoken"
    copy.write_bytes(find_cl100k().read_bytes())
    assert load_tokenizer(str(copy)).sha256 == cl100k.sha256


def test_the_missing_cl100k_error_names_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("DIFFMEGATRON_TIKTOKEN", "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(UserError, match=r"cl100k_base.tiktoken \(sha256 223921b7.*DIFFMEGATRON"):
        load_tokenizer("cl100k_base")


def test_damaged_cl100k_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cl100k_base.tiktoken").write_text("IQ== 0\n")
    monkeypatch.setenv("DIFFMEGATRON_TIKTOKEN", str(tmp_path))
    with pytest.raises(UserError, match="has sha256"):
        load_tokenizer("cl100k_base")


def _write_ranks(path: Path, merges: list[bytes]) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + merges
    path.write_text(
        "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    )


def test_any_tiktoken_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.tiktoken"
    _write_ranks(path, [b"he", b"hel"])
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("hello").tolist() == [257, ord("l"), ord("o")]
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (258, 259)


def test_description_beside_a_tiktoken_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.tiktoken"
    _write_ranks(path, [b"he"])
    plain = load_tokenizer(str(path)).sha256
    description = {"pat_str": "[a-z]|.", "special_tokens": {"<|endoftext|>": 300}}
    (tmp_path / "mine.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("he").tolist() == [ord("h"), ord("e")]
    assert tokenizer.end_of_document == 300
    assert tokenizer.sha256 != plain


def test_damaged_hugging_face_folder(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("content", ["", "not base64 at all\n", "IQ== 0\n"])
def test_damaged_tiktoken_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.tiktoken"
    path.write_text(content)
    with pytest.raises(UserError, match="is not a tiktoken file"):
        load_tokenizer(str(path))


def change_ranks(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Return a function that replaces the bytes ``old`` by ``new`` in a tiktoken file.

    The argument of the returned function is the path of the JSON description beside this file.
    """

    def change(description: Path) -> None:
        path = description.with_suffix(".tiktoken")
        path.write_bytes(path.read_bytes().replace(old, new))

    return change


def describe(pattern: str, **special: int) -> Callable[[Path], object]:
    content = {"pat_str": pattern, "special_tokens": {"<|endoftext|>": 300, **special}}
    return lambda description: description.write_text(json.dumps(content))


DAMAGED = {
    "a byte without a line": (change_ranks(b"AA== 0\n", b""), "the 256 bytes among them"),
    "two of one rank": (change_ranks(b"AA== 0\n", b"AA== 7\n"), "its ranks must differ"),
    "a rank below 0": (change_ranks(b"AA== 0\n", b"AA== -1\n"), "from 0 to 2147483647"),
    "a rank beyond all": (change_ranks(b"AA== 0\n", b"AA== 4294967296\n"), "from 0 to 2147483647"),
    "no file": (os.mkfifo, "is a FIFO"),
    "deep": (lambda path: path.write_text(100_000 * "["), "recursion limit"),
    "no pattern": (lambda path: path.write_text("{}"), "Field required"),
    "a pattern that is none": (describe("["), "has a pat_str that cannot be used"),
    "the id of a rank": (describe(".", other=7), "an id that no other token has"),
    "an id twice": (describe(".", other=300), "an id that no other token has"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_unusable_tiktoken_description_is_refused(name: str, tmp_path: Path) -> None:
    change, said = DAMAGED[name]
    _write_ranks(tmp_path / "mine.tiktoken", [b"he"])
    change(tmp_path / "mine.json")
    with pytest.raises(UserError, match=said) as caught:
        load_tokenizer(str(tmp_path / "mine.tiktoken"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content", ["[]", '{"eos_token": ["a"]}', '{"eos_token": {}}', 9_999 * "["]
)
def test_a_damaged_tokenizer_config_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json is damaged and cannot be used"):
        load_tokenizer(str(folder))


def test_lone_surrogate_is_an_error() -> None:
    with pytest.raises(UnicodeEncodeError):
        load_tokenizer("bytes").encode("\ud800")


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="'gpt5' is unknown"):
        load_tokenizer("gpt5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small byte-level BPE tokenizer in Hugging Face's format."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary["he"] = len(vocabulary)
    built = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=[("h", "e")]))
    built.pre_tokenizer = ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(["<s>", "</s>"])
    built.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", built.token_to_id("<s>"))]
    )
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return tmp_path


def test_hugging_face_folder(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (259, 258)
    ids = tokenizer.encode("he said </s>")
    assert ids.dtype == np.uint32
    assert ids[0] == 256, "'he' is merged, and a document begins without <s>"
    assert 258 not in ids, "special text in a document is ordinary text"
    assert tokenizer.decode(ids) == "he said </s>"
    assert tokenizer.decode([258]) == "</s>"


def test_tokenizer_json_loads_as_its_folder(folder: Path) -> None:
    by_file = load_tokenizer(str(folder / "tokenizer.json"))
    assert by_file.name == str(folder)
    assert by_file.sha256 == load_tokenizer(str(folder)).sha256
    data = {"tokenizer": f"{folder}/tokenizer.json", "sources": [{"path": "corpus"}]}
    assert DataConfig.model_validate(data).tokenizer == str(folder)


def test_settings_for_batches_and_augmentation_are_not_applied(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "he said: hehe, the hen" * 5
    expected = load_tokenizer(str(folder)).encode(text).tolist()
    assert not caplog.messages
    built = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    built.enable_truncation(8)
    built.enable_padding(length=999)
    built.model.dropout = 0.9
    built.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(str(folder)).encode(text).tolist() == expected
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("truncation and padding and dropout of")
    exported = load_exported(folder)
    assert exported(text, add_special_tokens=False)["input_ids"] == expected
    # A tokenizer of the other kind that samples has no BPE dropout.
    sampling = tokenizers.models.Unigram([("h", -1.0), ("e", -1.0), ("he", -1.0)], alpha=0.1)
    unigram = tokenizers.Tokenizer(sampling)
    assert encode_whole_texts(unigram) == ["alpha"]
    assert {len(unigram.encode(20 * "he").ids) for _ in range(20)} == {20}


def test_errors_of_the_library_are_one_sentence(folder: Path) -> None:
    built = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The regular expression backtracks exponentially, and the library gives up with a panic.
    slow = tokenizers.normalizers.Replace(tokenizers.Regex("(a*)*$"), "x")
    built.normalizer = slow
    built.save(str(folder / "tokenizer.json"))
    with pytest.raises(EncodeError, match="cannot encode the text: Onig: Regex search error"):
        load_tokenizer(str(folder)).encode(4_000 * "a" + "b")
    with pytest.raises(KeyboardInterrupt), explain_library_errors():
        raise KeyboardInterrupt


def test_a_normalizer_that_lengthens_texts_without_end_is_refused(folder: Path) -> None:
    doubled = tokenizers.normalizers.Replace("a", "aa")
    for number, is_refused in ((9, False), (40, True)):
        built = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        built.normalizer = tokenizers.normalizers.Sequence(number * [doubled])
        built.save(str(folder / "tokenizer.json"))
        if not is_refused:
            assert len(load_tokenizer(str(folder)).encode("a")) == 2**number
    with pytest.raises(UserError, match=r"can lengthen a text 1.09951e\+12 times, more than 1000"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("kind", ["Hugging Face", "tiktoken"])
def test_ids_that_token_files_cannot_store_are_refused(kind: str, folder: Path) -> None:
    name = str(folder)
    if kind == "Hugging Face":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"]["he"] = 2**31
        (folder / "tokenizer.json").write_text(json.dumps(content))
    else:
        name = str(folder / "mine.tiktoken")
        _write_ranks(Path(name), [])
        # The id after the highest rank becomes that of the token <|endoftext|>.
        change_ranks(b"/w== 255\n", b"/w== 2147483647\n")(folder / "mine.json")
    with pytest.raises(UserError, match="has the id 2147483648, but token files can store ids up"):
        load_tokenizer(name)


def test_hugging_face_folder_without_end_of_document(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="has eos_token None, which is not a token"):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r'config.json does not exist; write .* {"eos_token": TOK'):
        load_tokenizer(str(folder / "tokenizer.json"))


def test_hugging_face_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_the_tokenizer_that_the_page_trains_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    code = page.split("### Your own tokenizer")[1].split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 10
    text = tmp_path / "text.txt"
    text.write_text(page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", str(text)])
    exec(compile(code, "train.py", "exec"), {})
    tokenizer = load_tokenizer("tokenizer")
    assert tokenizer.decode([tokenizer.end_of_document]) == "<|endoftext|>"
    ids = tokenizer.encode(page)
    assert tokenizer.decode(ids) == page and len(ids) < len(page.encode()) / 3
