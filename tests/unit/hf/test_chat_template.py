"""Tests that the exported chat template yields the tokens that ``prepare`` writes for a chat."""

import base64
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, Qwen2Tokenizer

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.hf.chat_template import CHAT_TEMPLATE
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.hf.tokenizer import write_tokenizer
from diffmegatron.training.trainer import train

# These tokens have several bytes. If a response was encoded together with the text around it, some
# of them would span the beginning or end of the response.
MERGED = [b"\n\n", b">\n", b"|>\n", b"\n ", b"12", b"123", b"<|", b"|>", b"im"]
CHATS = [
    [("user", "Hi"), ("assistant", "Hello\n")],
    [
        ("system", "Be brief."),
        ("user", "1234"),
        ("assistant", "\n\n 12"),
        ("user", "so?\n"),
        ("assistant", " >\n>"),
        ("user", ""),
        ("assistant", ""),
    ],
    [("assistant", "\tfirst"), ("tool", "4 |>"), ("assistant", "né e\u0301")],
]


def tiktoken_file(folder: Path) -> str:
    tokens = [bytes([byte]) for byte in range(256)] + MERGED
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (folder / "small.tiktoken").write_bytes(b"".join(lines))
    return str(folder / "small.tiktoken")


def hugging_face_folder(folder: Path, *, has_chat_tokens: bool, normalizer: Any = None) -> str:
    """Write a byte-level tokenizer with the two-byte tokens of ``MERGED`` and a chat template."""
    letters = dict(enumerate(_letters()))
    spelled = ["".join(letters[byte] for byte in token) for token in MERGED if len(token) == 2]
    vocabulary = {letter: byte for byte, letter in letters.items()}
    vocabulary |= {token: 256 + number for number, token in enumerate(spelled)}
    bpe = models.BPE(vocabulary, [(token[0], token[1]) for token in spelled])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    specials = ["</s>", *(["<|im_start|>", "<|im_end|>"] if has_chat_tokens else [])]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "tokenizer_class": "LlamaTokenizer", "chat_template": "none"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def _letters() -> list[str]:
    table = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    assert set(letters) == set(table.alphabet())
    return letters


def as_messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def prepared(folder: Path, tokenizer: str, copies: int = 1) -> list[list[int]]:
    """Return the token ids that ``prepare`` writes for each chat of ``CHATS``, in order."""
    chats = [json.dumps({"messages": as_messages(chat)}) for chat in CHATS]
    (folder / "chats.jsonl").write_text("\n".join(chats * copies))
    manifest = prepare(
        [folder / "chats.jsonl"],
        folder / "corpus",
        tokenizer,
        layout="chat",
        max_reject_share=0,
        show_progress=False,
    )
    tokens = np.fromfile(folder / "corpus.bin", np.uint16)
    ends = np.flatnonzero(tokens == manifest.tokenizer.end_of_document) + 1
    return [part.tolist() for part in np.split(tokens, ends)[:-1]]


def exported(
    folder: Path, tokenizer: str, model_type: str = "llama", seq_length: int = 4096
) -> Any:
    out = folder / "export"
    out.mkdir()
    AutoConfig.for_model(model_type).save_pretrained(out)
    write_tokenizer(load_tokenizer(tokenizer), seq_length, out, chat=True)
    return AutoTokenizer.from_pretrained(out, local_files_only=True)


@pytest.mark.parametrize("kind", ["bytes", "tiktoken", "folder", "folder with chat tokens"])
def test_template_gives_the_tokens_of_the_training(tmp_path: Path, kind: str) -> None:
    if kind == "bytes":
        name = "bytes"
    elif kind == "tiktoken":
        name = tiktoken_file(tmp_path)
    else:
        has_chat_tokens = kind.endswith("tokens")
        name = hugging_face_folder(tmp_path / "folder", has_chat_tokens=has_chat_tokens)
    documents = prepared(tmp_path, name)
    tokenizer = exported(tmp_path, name, "qwen3" if kind.endswith("tokens") else "llama")
    for chat, document in zip(CHATS, documents, strict=True):
        messages = as_messages(chat)
        assert tokenizer.apply_chat_template(messages, return_dict=False) == document
        # The prompt of a generation is all text before the last response.
        prompt = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        assert prompt == document[: len(prompt)]
        rest = tokenizer.decode(document[len(prompt) :])
        assert rest == f"{chat[-1][1]}<|im_end|>{tokenizer.eos_token}"
    assert tokenizer.padding_side == "left"
    assert (
        tokenizer("assistantly 12").input_ids
        == load_tokenizer(name).encode("assistantly 12").tolist()
    )


def test_check_does_not_warn_about_a_small_seq_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = exported(tmp_path, "bytes", seq_length=16)
    assert not caplog.messages
    # A user of the export still gets the warning.
    tokenizer.apply_chat_template(as_messages(CHATS[1]))
    assert "longer than the specified maximum" in caplog.messages[0]


def test_chat_markers_are_special_tokens_only_in_chats(tmp_path: Path) -> None:
    name = hugging_face_folder(tmp_path / "folder", has_chat_tokens=True)
    tokenizer = load_tokenizer(name)
    start, end = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert [document[0] for document in prepared(tmp_path, name)] == [start] * 3
    assert tokenizer.encode_chat("<|im_start|>a<|im_end|>").tolist() == [start, ord("a"), end]
    # In a plain document, the markers are encoded as ordinary text.
    assert not {start, end} & set(tokenizer.encode("<|im_start|>a<|im_end|>").tolist())


def test_an_inexact_template_is_not_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that a template which would yield other tokens than training is not exported.

    The normalizer here strips white space. Training encodes each piece of a chat separately, so
    every piece is stripped. The exported tokenizer would strip only the whole text.
    """
    folder = tmp_path / "folder"
    strip = normalizers.Strip()
    name = hugging_face_folder(folder, has_chat_tokens=False, normalizer=strip)
    tokenizer = exported(tmp_path, name)
    assert tokenizer.chat_template is None
    assert "the export has no chat template" in caplog.text
    before, after = (path / "tokenizer.json" for path in (folder, tmp_path / "export"))
    assert before.read_bytes() == after.read_bytes()


def test_a_tokenizer_that_does_not_split_before_responses_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the template is exported with a warning about white space before responses.

    The split before responses is in the pre-tokenizer of tokenizer.json. transformers does not use
    this pre-tokenizer when it builds Qwen2's tokenizer, so responses that begin with white space
    get other tokens.
    """
    name = hugging_face_folder(tmp_path / "folder", has_chat_tokens=True)
    file = Path(name) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    qwen2 = Qwen2Tokenizer()._tokenizer
    tokenizer.normalizer, tokenizer.pre_tokenizer = qwen2.normalizer, qwen2.pre_tokenizer
    tokenizer.save(str(file))
    told = exported(tmp_path, name, "qwen2")
    assert "responses that begin with white space get other tokens" in caplog.text
    assert CHAT_TEMPLATE.strip() == told.chat_template.strip()


def test_an_export_without_chats_keeps_the_folders_template(tmp_path: Path) -> None:
    name = hugging_face_folder(tmp_path / "folder", has_chat_tokens=True)
    out = tmp_path / "export"
    out.mkdir()
    write_tokenizer(load_tokenizer(name), 4096, out)
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["padding_side"]) == ("none", "left")
    assert CHAT_TEMPLATE not in [path.read_text() for path in out.glob("*.jinja")]


def test_the_export_of_a_chat_run_gives_the_training_tokens(
    tmp_path: Path, tiny_recipe: Any
) -> None:
    document, *_ = prepared(tmp_path, "bytes", copies=10)
    changes = ["training.steps=3", "data.validation_fraction=0.5"]
    assert train(tiny_recipe(*changes, f"data.sources=[{{path: {tmp_path}/corpus}}]"))
    checkpoint = CheckpointStore(tmp_path / "run").latest()
    assert checkpoint is not None
    export_checkpoint(checkpoint, tmp_path / "hf", verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert tokenizer.apply_chat_template(as_messages(CHATS[0]), return_dict=False) == document
