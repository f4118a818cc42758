"""Tests of published chat templates, and of small tokenizers of the published structure.

``chat_templates/README.md`` lists the sources of the templates. The tokenizers have the
normalizers, split patterns and special tokens of the models, and a small vocabulary.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from diffmegatron.data.prepare.chat_template import ChatTemplate
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from tests.paths import ROOT

TEMPLATES = Path(__file__).parent / "chat_templates"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = [
    {"role": "user", "content": "The sea?\n"},
    # The template of Qwen3 writes "think" before this response, and every template "assistant".
    {"role": "assistant", "content": "t"},
    {"role": "user", "content": "It's 12345 miles\t\n\n wide, isn't it? 数学"},
    {"role": "assistant", "content": "assistant: 26 Jul 2024, né and no\n- e\u0301"},
]


@dataclass(frozen=True)
class Published:
    """Structure of a model's tokenizer, and the text around each response that is learned."""

    pattern: str  # regular expression that splits texts
    special: tuple[str, ...]  # special tokens
    bos: str | None
    eos: str
    before: str = ""  # text that the template writes between the generation prompt and a response
    after: str = ""  # text that the template marks as the response's behind ``eos``
    normalizer: str | None = None


LLAMA3 = Published(
    WORDS.replace("DIGITS", r"\p{N}{1,3}"),
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|begin_of_text|>",
    "<|eot_id|>",
)
QWEN = Published(WORDS.replace("DIGITS", r"\p{N}"), CHATML, None, "<|im_end|>", normalizer="NFC")
MISTRAL = Published(
    CASED_WORDS, ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "<s>", "</s>",
)  # fmt: skip
MODELS = {
    "llama_3.1": LLAMA3,
    "llama_3.2": LLAMA3,
    "qwen2.5": QWEN,
    "qwen3": QWEN,
    "qwen3_training": Published(
        QWEN.pattern, CHATML, None, "<|im_end|>", "<think>\n\n</think>\n\n", "\n", "NFC"
    ),
    "mistral_nemo": MISTRAL,
    "mistral_small_3.2": MISTRAL,
    "smollm2": Published("", CHATML, "<|im_start|>", "<|im_end|>"),
}


@cache
def _trained(model: Published) -> str:
    """Return the ``tokenizer.json`` of a model, with merges learned from a page of text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges="{1,3}" in model.pattern))
    if model.normalizer:
        tokenizer.normalizer = getattr(normalizers, model.normalizer)()
    if model.pattern:
        cut = pre_tokenizers.Split(Regex(model.pattern), "isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        cut = pre_tokenizers.Digits(individual_digits=True)
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    # The second text has merges of white space, which the page lacks.
    texts = [(ROOT / "docs" / "data.md").read_text(), 999 * "a\n\n\n   b \n"]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in model.special])
    return tokenizer.to_str()


def write_folder(folder: Path, name: str) -> str:
    """Write the tokenizer and the template of a model to ``folder``; return its path."""
    model = MODELS[name]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(_trained(model))
    tokens = {"eos_token": model.eos} | ({"bos_token": model.bos} if model.bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "chat_template.jinja").write_bytes((TEMPLATES / f"{name}.jinja").read_bytes())
    return str(folder)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3"])
def test_chats_are_those_of_transformers_and_only_responses_are_learned(
    name: str, tmp_path: Path
) -> None:
    model = MODELS[name]
    folder = write_folder(tmp_path / "folder", name)
    tokenizer = load_tokenizer(folder)
    text, parts = ChatTemplate(tokenizer).encode(CHAT)
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = fast.apply_chat_template(CHAT, tokenize=False)
    for form in ("%d %b %Y", "%Y-%m-%d"):
        expected = expected.replace(
            datetime.now().strftime(form), datetime(2024, 7, 26).strftime(form)
        )
    assert text == expected
    ids = [*np.concatenate(parts).tolist(), tokenizer.end_of_document]
    assert ids == fast(text, add_special_tokens=False)["input_ids"][: len(ids)]
    responses = [str(message["content"]) for message in CHAT[1::2]]
    if model.normalizer == "NFC":
        responses = [response.replace("e\u0301", "é") for response in responses]
    # The end of the document follows the last response.
    ends = [model.eos + model.after, ""]
    assert [tokenizer.decode(part) for part in parts[1::2]] == [
        model.before + response + end for response, end in zip(responses, ends, strict=True)
    ]


def test_a_template_that_shortens_earlier_responses_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "folder", "qwen3"))
    with pytest.raises(UserError, match="renders message 2 differently within the chat"):
        ChatTemplate(tokenizer)


LETTERS = [
    *"aaaaZZ..\n\n\n\n\n\n\r\t'0/", "é", "e\u0301", "\u0301", "数", "Ж", "\x85", "\u2003", "\x1c",
    "'s", "\u3002",
]  # fmt: skip


@pytest.mark.parametrize("name", ["llama_3.2", "qwen2.5", "mistral_nemo", "smollm2"])
def test_long_texts_are_encoded_in_pieces_with_the_ids_of_the_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffmegatron.data.tokenizers._LONG", 3)
    folder = write_folder(tmp_path / "folder", name)
    tokenizer, whole = load_tokenizer(folder), Tokenizer.from_file(f"{folder}/tokenizer.json")
    whole.encode_special_tokens = True
    pieces = 0
    random = Random(1)
    for _ in range(200):
        text = "".join(random.choices(LETTERS, k=200))
        assert tokenizer.encode(text).tolist() == whole.encode(text).ids, repr(text)
        pieces += len(list(tokenizer._pieces(text)))
    assert pieces > 1_000


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
    ],
)
def test_texts_of_other_tokenizers_are_not_encoded_in_pieces(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffmegatron.data.tokenizers._LONG", 3)
    path = Path(write_folder(tmp_path / "folder", "llama_3.2")) / "tokenizer.json"
    text = "a\na" * 9
    assert len(list(load_tokenizer(str(path))._pieces(text))) > 1
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert list(load_tokenizer(str(path))._pieces(text)) == [text]
