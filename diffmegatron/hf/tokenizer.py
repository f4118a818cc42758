"""Write the tokenizer of a run into an export: convert a tiktoken encoding, or copy files.

A tiktoken encoding becomes a fast Hugging Face tokenizer with the same ids.
``transformers.integrations.tiktoken`` is not used, because it would split long numbers differently
from tiktoken.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from diffmegatron.data.tokenizers import HuggingFaceTokenizer, TiktokenTokenizer, Tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import read_json
from diffmegatron.hf.chat_template import (
    CHAT_TEMPLATE,
    check_chat,
    first_difference,
    load_exported,
    split_responses,
)

log = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
# A class that uses tokenizer.json unchanged; transformers 4 and 5 both have a class of this name.
_CLASS = "PreTrainedTokenizerFast"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
)
# `check_chat` inserts this text before sample responses. A tokenizer could merge its white space
# with the newline that ends the prompt.
_SPACE = "\n\n "
SAMPLE = (
    "The quick brown fox doesn't jump; WE'LL say it's 1 or 22 or 333 or 4444 or 1234567890.",
    'def f(x: int) -> str:\n    if x != 0:\n\t\treturn f"{x:>10,.2f}"  # 100%\n\n\n',
    "    return ''\n",
    "#include <stdio.h>\r\nint main(void) { return a[i++]->b << 3 | ~0xFFu; }\r\n",
    " leading, trailing ",
    "      \n  \n\n \t \n   x   y\u00a0\u2003z\u3000\u2028end\x85   ",
    "\n",
    "   ",
    "Grüße aus Zürich: naïve cafés, \u017f'\u017f \u212a'\u212a don'T İstanbul",
    "e\u0301 o\u0308\u0323 a\u030a\u0304 \u0301 क्षत्रिय ภาษาไทย ﷺ",
    "日本語のテキスト、中文文本。한국어 텍스트 Ελληνικά русский עברית العربية ١٢٣٤٥ Ⅻ½²",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 \U0001f926\U0001f3fd\u200d\u2642\ufe0f \u200b\ufeff\ufffd\x00\x07\x1b[0m",
    "\\frac{\\partial L}{\\partial \\lambda_{q1}} = -\\sum_i x_i^2 <|not_special|> <|endoftext",
)


def write_tokenizer(
    tokenizer: Tokenizer, seq_length: int, directory: Path, *, chat: bool = False
) -> None:
    """Write and check ``tokenizer.json`` and ``tokenizer_config.json``.

    A tiktoken encoding is converted. If samples then have other ids than in training, UserError is
    raised.

    The files of a Hugging Face folder are copied. If samples then have other ids than in training,
    a warning is logged.

    Args:
        seq_length: maximum length of a text in tokens; only a converted tokenizer stores it.
        directory: directory that already contains ``config.json``, which ``AutoTokenizer`` reads.
        chat: whether to add the template of :mod:`diffmegatron.hf.chat_template`. It is left out of
            copied files if sample chats would have other ids than in training.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _write_copied(tokenizer, directory, chat=chat)
        return
    if not isinstance(tokenizer, TiktokenTokenizer):
        raise UserError(
            f"tokenizer {tokenizer.name!r} cannot be exported; only tiktoken encodings and "
            "folders of Hugging Face tokenizers can"
        )
    end = tokenizer.encoding.decode_single_token_bytes(tokenizer.end_of_document).decode()
    converted = convert(tokenizer.encoding)
    if chat:
        split_responses(converted)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=converted,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        model_max_length=seq_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    # transformers 5 writes a name of this class that transformers 4.57 does not have.
    config = read_json(directory / TOKENIZER_CONFIG, dict[str, Any]) | {"tokenizer_class": _CLASS}
    _write_config(config, directory)
    check_converted_tokenizer(tokenizer.encoding, directory)
    if chat:
        check_chat(tokenizer, directory)
        check_chat(tokenizer, directory, _SPACE)


def _write_copied(tokenizer: HuggingFaceTokenizer, directory: Path, *, chat: bool) -> None:
    copy_tokenizer(tokenizer.folder, directory)
    config = read_json(directory / TOKENIZER_CONFIG, dict[str, Any]) | {"padding_side": "left"}
    # auto_map names code files that are not copied. Training did not use them.
    config.pop("auto_map", None)
    if chat:
        # Training used ChatML, not the folder's own template.
        config.pop("chat_template", None)
        for template in directory.glob("chat_template.*"):
            template.unlink()
        if _give_template(tokenizer, config, directory):
            return
        shutil.copyfile(tokenizer.folder / "tokenizer.json", directory / "tokenizer.json")
    _write_config(config, directory)
    if _first_different_text(tokenizer, directory) is not None:
        _write_config(config | {"tokenizer_class": _CLASS}, directory)
    if (different := _first_different_text(tokenizer, directory)) is not None:
        log.warning(
            "AutoTokenizer gives other ids than training for %r, because this model_type has its "
            "own tokenizer class; load the tokenizer with PreTrainedTokenizerFast.from_pretrained",
            different,
        )


def _first_different_text(tokenizer: HuggingFaceTokenizer, directory: Path) -> str | None:
    """Return the first sample text that ``AutoTokenizer`` and training encode as different ids."""
    exported = load_exported(directory)
    for text in SAMPLE:
        ids = exported(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids != tokenizer.encode(text).tolist():
            return text
    return None


def _give_template(
    tokenizer: HuggingFaceTokenizer, config: dict[str, Any], directory: Path
) -> bool:
    """Add the chat template to copied files, if sample chats then have the ids of training.

    Return whether it was added. If only chats whose responses begin with white space have other
    ids, the template is added and a warning is logged.
    """
    # Other tokenizer classes rebuild parts of tokenizer.json, without split_responses' change.
    _write_config(config | {"tokenizer_class": _CLASS}, directory)
    changed = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    split_responses(changed)
    changed.save(str(directory / "tokenizer.json"))
    template = directory / "chat_template.jinja"
    template.write_text(CHAT_TEMPLATE, encoding="utf-8")
    try:
        check_chat(tokenizer, directory)
    except UserError as error:
        log.warning("%s; the export has no chat template", error)
        template.unlink()
        return False
    try:
        check_chat(tokenizer, directory, _SPACE)
    except UserError as error:
        log.warning("responses that begin with white space get other tokens: %s", error)
    return True


def _write_config(config: dict[str, Any], directory: Path) -> None:
    content = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / TOKENIZER_CONFIG).write_text(content, encoding="utf-8")


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy a tokenizer's files from one Hugging Face folder into another."""
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, directory / path.name)


def convert(encoding: tiktoken.Encoding) -> tokenizers.Tokenizer:
    """Convert an encoding to byte-level BPE of the ``tokenizers`` library, with the same ids.

    tiktoken repeatedly joins the two neighbours whose joined bytes are the token of lowest rank.
    ``tokenizers`` needs a list of merges: for every token in the order of rank, all pairs of tokens
    whose joined bytes are this token.
    """
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    special: dict[str, int] = encoding._special_tokens
    # add_special_tokens would choose other ids for special tokens outside the vocabulary.
    vocabulary = {_visible(token): rank for token, rank in ranks.items()} | special
    # With ignore_merges, a piece of text that equals a token becomes this token without merges, as
    # in tiktoken.
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(ranks), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(oniguruma_pattern(encoding._pat_str)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    return tokenizer


_CHARACTERS: dict[int, str] = bytes_to_unicode()


def _visible(token: bytes) -> str:
    """Return a token in GPT-2's byte-level spelling: one printable character per byte."""
    return "".join(map(_CHARACTERS.__getitem__, token))


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_visible(left), _visible(right)) for left, right in pairs]
    return merges


_REGEX_PART = re.compile(
    r"""(?P<interval>\{\d+(?:,\d*)?\}\+)  # possessive {m,n}+
      | \\[pP]\{[^}]*\} | \\. | \[\^?\]?(?:\\.|[^\]\\])*\] | .""",
    re.VERBOSE | re.DOTALL,
)


def oniguruma_pattern(pattern: str) -> str:
    r"""Translate tiktoken's regular expression (Rust's fancy-regex) for ``tokenizers`` (Oniguruma).

    In Oniguruma, ``X{1,3}+`` is not possessive but repeats ``X{1,3}``, so it becomes
    ``(?>X{1,3})``. ``^`` and ``$`` match at every line, so they become ``\A`` and ``\z``.
    """
    parts: list[str] = []
    open_groups: list[int] = []
    atom = 0
    for match in _REGEX_PART.finditer(pattern):
        part = match[0]
        if match["interval"]:
            parts[atom:] = ["(?>", *parts[atom:], part[:-1], ")"]
            continue
        if part == "(":
            open_groups.append(len(parts))
        # A quantifier after a closing parenthesis applies to the whole group.
        atom = open_groups.pop() if part == ")" else len(parts)
        parts.append({"^": r"\A", "$": r"\z"}.get(part, part))
    return "".join(parts)


def check_converted_tokenizer(encoding: tiktoken.Encoding, directory: Path) -> None:
    """Check that an export's ``AutoTokenizer`` encodes and decodes samples as the encoding does."""
    exported = load_exported(directory)
    specials = sorted(encoding.special_tokens_set)
    texts = [*SAMPLE, "\n\n".join(SAMPLE), *specials, " a\n".join(specials), "".join(specials)]
    for text in texts:
        expected = encoding.encode(text, allowed_special="all")
        # verbose=True would warn of texts longer than a small model's seq_length.
        ids = exported(text, verbose=False)["input_ids"]
        if ids != expected:
            raise UserError(
                f"the exported tokenizer gives other ids than the encoding {encoding.name!r} for "
                f"{text!r}, {first_difference(ids, expected)}; it cannot be exported exactly"
            )
        decoded = exported.decode(ids)
        if decoded != text:
            raise UserError(
                f"the exported tokenizer decodes the ids of {text!r} to {decoded!r}; "
                f"the encoding {encoding.name!r} cannot be exported exactly"
            )
