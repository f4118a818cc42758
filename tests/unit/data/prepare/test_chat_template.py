"""Tests of chats in a tokenizer's own template: token ids, and tokens that have a loss."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer

from diffmegatron.data.index.token_store import open_corpus
from diffmegatron.data.prepare.chat_template import ChatTemplate
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.prepare.record_formats import UnusableError
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.hf.tokenizer import write_tokenizer

SPECIAL = ["<s>", "</s>", "<|start|>", "<|head|>", "<|eot|>"]
# LLAMA3 and MISTRAL resemble the templates of these models. PLAIN uses no special tokens. MARKED
# marks responses with {% generation %}.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m['role'] + '<|head|>\\n\\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|head|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] + eos_token }}{% else %}{{ raise_exception('roles!') }}{% endif %}"
    "{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ':\\n' + m['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|head|>' }}"
    "{% generation %}{{ m['content'] + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ '<|start|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>' }}{% endif %}"
)
# This template writes "Hello" before each response, and two line ends at its own beginning.
BOILERPLATE = (
    "\n\n  {% for m in messages %}{% if m['role'] == 'assistant' %}<|start|>Hello<|head|>"
    "{{ m['content'] }}<|eot|>{% else %}{{ m['content'] + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# This template cuts every message except the last to one character. Some published templates
# similarly drop the reasoning of earlier responses.
FORGETFUL = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|head|>' }}"
    "{{ m['content'] if loop.last else m['content'][:1] }}{{ '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|head|>' }}{% endif %}"
)
# The prompt of this template ends with a space, which the tokenizer merges with the first letter of
# the response.
STRADDLING = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Hi, assistant"},
    {"role": "assistant", "content": "Hello Hello\n\n- né"},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hello"},
]
LEARNED = {
    "llama 3": (LLAMA3, ["Hello Hello\n\n- né<|eot|>", "Hello<|eot|>"]),
    "mistral": (MISTRAL, [" Hello Hello\n\n- né</s>", " Hello"]),
    "plain": (PLAIN, ["Hello Hello\n\n- né\n\n", "Hello\n\n"]),
    "boilerplate": (
        BOILERPLATE,
        ["Hello<|head|>Hello Hello\n\n- né<|eot|>", "Hello<|head|>Hello<|eot|>"],
    ),
    "marked": (MARKED, ["Hello Hello\n\n- né<|eot|>", "Hello<|eot|>"]),
}


def write_folder(folder: Path, template: str | None) -> str:
    """Write a byte-level tokenizer to ``folder``, and return the path of ``folder``.

    The tokenizer has two merges: a space with an H, and a line end with a line end.

    Args:
        folder: folder to create.
        template: chat template of the tokenizer; None for a tokenizer without template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "ĠH", "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "H"), ("Ċ", "Ċ")]))
    # Split line ends from words, as the tokenizers of Llama 3 and Qwen do.
    cut = pre_tokenizers.Split(Regex(r"\s*[\r\n]+| ?[^\s]+|\s+"), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.parametrize("kind", LEARNED)
def test_ids_match_the_template_and_only_responses_are_learned(kind: str, tmp_path: Path) -> None:
    template, learned = LEARNED[kind]
    name = write_folder(tmp_path / "folder", template)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    corpus = tmp_path / "corpus"
    prepare([tmp_path / "chats.jsonl"], corpus, name, layout="template", show_progress=False)
    tokens = np.fromfile(f"{corpus}.bin", np.uint16).tolist()
    trained = load_tokenizer(name)
    assert tokens[-1] == trained.end_of_document
    # Segments without loss and with loss alternate. The first segment has no loss.
    _, parts = ChatTemplate(trained).encode(CHAT)
    assert [trained.decode(part) for part in parts[1::2]] == learned
    assert [token for part in parts for token in part.tolist()] == tokens[:-1]
    mask = open_corpus(str(corpus)).loss_mask(0)
    expected = [place % 2 == 1 for place, part in enumerate(parts) for _ in part]
    assert mask.tolist() == [*expected, True]

    # The exported tokenizer and its template must encode the chat to the same ids.
    out = tmp_path / "export"
    out.mkdir()
    AutoConfig.for_model("llama").save_pretrained(out)
    write_tokenizer(trained, 64, out)
    exported = AutoTokenizer.from_pretrained(out, local_files_only=True)
    whole = exported.apply_chat_template(CHAT, return_dict=False)
    assert whole[: len(tokens) - 1] == tokens[:-1]
    for number, place in ((1, 1), (3, 3)):
        prompt = exported.apply_chat_template(
            CHAT[:number], add_generation_prompt=True, return_dict=False
        )
        assert [token for part in parts[:place] for token in part.tolist()] == prompt


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "has no chat template, neither in chat_template.jinja"),
        (FORGETFUL, r"message 2 differently within the chat .* no \{% generation %\}"),
        (STRADDLING, "a token of the chat template extends over the beginning of a response"),
        ("{{ raise_exception('not today') }}", "cannot render this chat: not today"),
        ("{% for %}", "cannot render this chat"),
        ("{{ 1 // 0 }}", "cannot render this chat: integer division or modulo by zero"),
        ("{{ 10.0 ** 999 }}", "cannot render this chat: .*Numerical result out of range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        (ENDLESS, "cannot render this chat: it takes more than 0.3 s of CPU time"),
    ],
)
def test_an_unusable_template_is_refused_before_any_output(
    template: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffmegatron.data.prepare.chat_template._CPU_SECONDS", 0.3)
    name = write_folder(tmp_path / "folder", template)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(UserError, match=sentence):
        prepare(
            [tmp_path / "chats.jsonl"],
            tmp_path / "corpus",
            name,
            layout="template",
            show_progress=False,
        )
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "chats.jsonl"}


def test_a_token_that_only_the_configuration_adds_is_refused(tmp_path: Path) -> None:
    name = write_folder(tmp_path / "folder", LLAMA3)
    path = tmp_path / "folder" / "tokenizer_config.json"
    added = {"added_tokens_decoder": {"999": {"content": "<|new|>", "special": True}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    with pytest.raises(UserError, match=r"adds the token '<\|new\|>' .*json does not contain"):
        ChatTemplate(load_tokenizer(name))


def test_another_tokenizer_has_no_template() -> None:
    with pytest.raises(UserError, match="tokenizer 'bytes' has no chat template; --layout templ"):
        ChatTemplate(load_tokenizer("bytes"))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": "Hi<|eot|>"}, "has '<|eot|>' in it"),
        ({"role": "system", "content": "Be brief."}, "cannot render this chat: roles!"),
        ({"role": "user", "content": [{"type": "text"}]}, "must have the strings"),
    ],
)
def test_chats_that_cannot_be_used_are_rejected(
    message: dict[str, object], reason: str, tmp_path: Path
) -> None:
    template = ChatTemplate(load_tokenizer(write_folder(tmp_path / "folder", MISTRAL)))
    with pytest.raises(UnusableError) as error:
        template.encode([message, *CHAT])
    assert reason in str(error.value)
    with pytest.raises(UnusableError, match="with a message of the assistant"):
        template.encode(CHAT[:1])
