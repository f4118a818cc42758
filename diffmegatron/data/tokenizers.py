"""Tokenizers that convert text to token ids; nothing is downloaded."""

import base64
import hashlib
import json
import logging
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import tiktoken
import tokenizers
from pydantic import BaseModel, Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_bytes, read_json, shorten

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
BYTE_TOKENIZER = "bytes"
CL100K = "cl100k_base"
CL100K_FILE_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
# Name of cl100k_base's file in tiktoken's cache: the sha1 of its download URL.
CL100K_CACHE_NAME = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
# Split pattern of cl100k_base in tiktoken >= 0.9.
CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
CL100K_SPECIAL_TOKENS = {
    END_OF_TEXT: 100257,
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}
# Markers of the start and the end of a chat message (ChatML).
CHAT_START, CHAT_END = "<|im_start|>", "<|im_end|>"
_MAX_ID = 1 << 31
SEARCH_VARIABLE = "DIFFMEGATRON_TIKTOKEN"
# Replacements of published tokenizers hardly lengthen a text.
_MAX_GROWTH = 1000
# The tokenizers library takes some hundred bytes of memory per byte of a text, and more time per
# byte for longer texts. Texts of more than so many characters are therefore encoded in pieces.
_LONG = 1 << 16
# A place after which a piece can begin: a line end between letters, digits or punctuation.
_LINE_END = re.compile(
    "[!-~\u0400-\u04ff\u3002\u4e00-\u9fff]\n(?=[A-Za-z\u0410-\u044f\u4e00-\u9fff])"
)
# The split patterns of Llama 3, Qwen and Mistral's Tekken. None of them looks behind a letter that
# follows a line end, and none joins both.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LINE_PATTERNS = (
    _WORDS % r"\p{N}{1,3}",
    _WORDS % r"\p{N}",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class EncodeError(UserError):
    """The library of a tokenizer cannot encode a text."""


@contextmanager
def explain_library_errors() -> Iterator[None]:
    """Turn every error of a tokenizer's library into an EncodeError."""
    try:
        yield
    except BaseException as error:
        # Rust's panics are no subclass of Exception. One occurs if a pattern backtracks too often.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = shorten(str(error) or type(error).__name__)
            raise EncodeError(f"the tokenizer cannot encode the text: {reason}") from None
        raise


class Tokenizer(ABC):
    """Base class of tokenizers."""

    name: str  # name or path that load_tokenizer accepts
    vocab_size: int  # highest id plus one, including special tokens
    end_of_document: int  # id of the token that ends every document
    sha256: str  # hash of everything that determines the ids
    has_chat_tokens: bool = False  # whether encode_chat uses CHAT_START and CHAT_END as tokens
    can_hang: bool = False  # whether an unknown regular expression may take very long for a text

    def encode_chat(self, text: str) -> np.ndarray:
        """Return the n token ids of a chat, uint32 ``[n]``.

        With ``has_chat_tokens``, each ``CHAT_START`` and ``CHAT_END`` in the text becomes a single
        token. Otherwise, they are encoded as ordinary text.
        """
        return self.encode(text)

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the n token ids, uint32 ``[n]``; special tokens are encoded as ordinary text.

        Raises:
            UnicodeEncodeError: the text has a lone surrogate, which UTF-8 cannot represent.
            EncodeError: the library of the tokenizer fails.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids, including special tokens; invalid UTF-8 becomes U+FFFD."""


class TiktokenTokenizer(Tokenizer):
    """Tokenizer of the tiktoken library."""

    def __init__(self, name: str, encoding: tiktoken.Encoding, end_of_document: int) -> None:
        self.name = name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.end_of_document = end_of_document

    @cached_property
    def sha256(self) -> str:  # type: ignore[override]
        """Hash of the split pattern, the mergeable ranks and the special tokens."""
        # The attributes are private, but tiktoken's documentation uses them to extend an encoding.
        digest = hashlib.sha256(self.encoding._pat_str.encode())
        for token, rank in sorted(self.encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d:%d:%s" % (rank, len(token), token))
        digest.update(json.dumps(self.encoding._special_tokens, sort_keys=True).encode())
        return digest.hexdigest()

    @override
    def encode(self, text: str) -> np.ndarray:
        text.encode()  # Raise an error for lone surrogates, which tiktoken would silently replace.
        with explain_library_errors():
            return self.encoding.encode_to_numpy(text, disallowed_special=())

    @override
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.encoding.decode([int(token) for token in ids])


class _Named(BaseModel):
    """Token that ``tokenizer_config.json`` contains as an object instead of a string."""

    content: str


class _FolderConfig(BaseModel):
    """Fields of ``tokenizer_config.json`` that are used."""

    eos_token: str | _Named | None = None


class _Description(BaseModel):
    """Content of the optional JSON file beside a ``.tiktoken`` file."""

    pat_str: str
    special_tokens: dict[str, Annotated[int, Field(ge=0, lt=_MAX_ID)]]


class HuggingFaceTokenizer(Tokenizer):
    """Fast tokenizer from a Hugging Face folder; its ``eos_token`` is the end of a document."""

    def __init__(self, folder: str) -> None:
        self.name, self.folder = folder, Path(folder)
        content = read_bytes(self.folder / "tokenizer.json")
        config = self.folder / "tokenizer_config.json"
        if not os.path.lexists(config):
            raise UserError(
                f"{format_path(config)} does not exist; write it beside tokenizer.json, with the "
                'token that ends a document: {"eos_token": TOKEN}'
            )
        token = read_json(config, _FolderConfig).eos_token
        token = token.content if isinstance(token, _Named) else token
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # The library raises Exception itself, not a subclass.
            raise UserError(
                f"{format_path(self.folder / 'tokenizer.json')} is not a tokenizer: "
                f"{shorten(str(error))}"
            ) from None
        if disabled := encode_whole_texts(self._tokenizer):
            log.warning(
                "%s of %s would change the ids of a text, and is not used",
                " and ".join(disabled),
                format_path(self.folder / "tokenizer.json"),
            )
        _check_growth(self._tokenizer, self.folder / "tokenizer.json")
        # With True, the library encodes text that looks like a special token as ordinary text.
        self._tokenizer.encode_special_tokens = True
        end = self._tokenizer.token_to_id(token) if token else None
        if end is None:
            raise UserError(
                f"{format_path(config)} has eos_token {shorten(repr(token))}, which is not a token "
                "of tokenizer.json; give the token that ends a document"
            )
        self.end_of_document = end
        added = self._tokenizer.get_added_tokens_decoder().items()
        ids = {each.content: np.uint32(number) for number, each in added}
        self._chat_tokens = {name: ids[name] for name in (CHAT_START, CHAT_END) if name in ids}
        self.has_chat_tokens = len(self._chat_tokens) == 2
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self._is_split_at_lines = _is_split_at_lines(self._tokenizer)
        parts = filter(None, (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer))
        self.can_hang = any(
            pattern not in _LINE_PATTERNS
            for part in parts
            for pattern in _patterns(json.loads(part.__getstate__()))
        )
        self.sha256 = hashlib.sha256(content + str(token).encode()).hexdigest()

    @override
    def encode(self, text: str) -> np.ndarray:
        text.encode()
        ids = []
        for piece in self._pieces(text):
            with explain_library_errors():
                found = self._tokenizer.encode(piece, add_special_tokens=False).ids
            ids.append(np.array(found, dtype=np.uint32))
        return np.concatenate(ids)

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of a text that the library encodes as it encodes the whole text."""
        start = 0
        while self._is_split_at_lines and (end := _LINE_END.search(text, start + _LONG)):
            yield text[start : end.end()]
            start = end.end()
        yield text[start:]

    @override
    def encode_chat(self, text: str) -> np.ndarray:
        if not self.has_chat_tokens:
            return self.encode(text)
        pieces = re.split(f"({'|'.join(map(re.escape, self._chat_tokens))})", text)
        ids = [
            [self._chat_tokens[piece]] if piece in self._chat_tokens else self.encode(piece)
            for piece in pieces
        ]
        return np.concatenate(ids, dtype=np.uint32)

    @override
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


def _check_growth(tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Refuse replacements that together can lengthen a text so much that encoding never ends."""
    if tokenizer.normalizer is None:
        return
    described = json.loads(tokenizer.normalizer.__getstate__())
    growth = 1.0
    for each in described.get("normalizers", [described]):
        if each["type"] == "Replace":
            replaced = len(each["pattern"].get("String", "")) or 1
            growth *= max(1.0, len(each["content"]) / replaced)
    if growth > _MAX_GROWTH:
        raise UserError(
            f"the normalizer of {format_path(path)} can lengthen a text {growth:g} times, more "
            f"than {_MAX_GROWTH} times; shorten its replacements"
        )


def _patterns(described: object) -> Iterator[str]:
    """Yield the regular expressions in the description of a normalizer or a pre-tokenizer."""
    if isinstance(described, dict):
        if isinstance(pattern := described.get("Regex"), str):
            yield pattern
        described = list(described.values())
    if isinstance(described, list):
        for each in described:
            yield from _patterns(each)


def _is_split_at_lines(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether the ids on both sides of every ``_LINE_END`` are known to be independent."""
    normalizer, splits = tokenizer.normalizer, tokenizer.pre_tokenizer
    if normalizer and type(normalizer).__name__ not in ("NFC", "NFD", "NFKC", "NFKD"):
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if splits is None or any("\n" in token.content or token.lstrip for token in added):
        return False
    described = json.loads(splits.__getstate__())
    is_split = False
    for each in described.get("pretokenizers", [described]):
        kind = each["type"]
        if kind == "Split" and each["pattern"].get("Regex") in _LINE_PATTERNS:
            is_split |= each["behavior"] == "Isolated" and not each["invert"]
        elif kind == "ByteLevel" and not each["add_prefix_space"]:
            is_split |= each["use_regex"]  # GPT-2's pattern
        elif kind != "Digits":
            return False
    return is_split


def encode_whole_texts(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Make a tokenizer encode every text in full and always in the same way.

    ``tokenizer.json`` can contain settings for batches of short texts and for augmentation, which
    the library then applies to every text. They are turned off here: truncation, padding, dropout
    (BPE) and sampling (Unigram). Return the names of those that were on.
    """
    disabled = []
    if tokenizer.truncation is not None:
        tokenizer.no_truncation()
        disabled.append("truncation")
    if tokenizer.padding is not None:
        tokenizer.no_padding()
        disabled.append("padding")
    model = tokenizer.model
    for name in ("dropout", "alpha", "nbest_size"):
        if getattr(model, name, None):
            setattr(model, name, None)
            disabled.append(name)
    return disabled


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Load the tokenizer ``bytes`` or ``cl100k_base``, or a tokenizer from a path.

    The path is a ``.tiktoken`` file, or a Hugging Face folder or its ``tokenizer.json``. The folder
    must also have ``tokenizer_config.json`` with ``eos_token``. The vocabulary of ``bytes`` is the
    256 bytes and ``<|endoftext|>``.

    A copy of the file of ``cl100k_base`` is loaded as ``cl100k_base``. Any other ``NAME.tiktoken``
    can have a ``NAME.json`` with ``pat_str`` and ``special_tokens``. Without ``NAME.json``,
    ``pat_str`` is that of ``cl100k_base``. The only special token is then ``<|endoftext|>``, with
    the highest id.

    Ids from 2**31 on are refused, because token files store int32.
    """
    tokenizer = _load(name_or_path)
    if tokenizer.vocab_size > _MAX_ID:
        raise UserError(
            f"tokenizer {tokenizer.name!r} has the id {tokenizer.vocab_size - 1}, but token files "
            f"can store ids up to {_MAX_ID - 1}; give its tokens lower ids"
        )
    return tokenizer


def _load(name_or_path: str) -> Tokenizer:
    if name_or_path == BYTE_TOKENIZER:
        encoding = tiktoken.Encoding(
            BYTE_TOKENIZER,
            # tiktoken's time is superlinear in the length of a piece, so pieces are short.
            pat_str=r"[\s\S]{1,64}",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
        return TiktokenTokenizer(BYTE_TOKENIZER, encoding, end_of_document=256)
    if name_or_path == CL100K:
        return _from_file(find_cl100k(), is_cl100k=True)
    path = Path(name_or_path)
    name = str(path.parent) if path.name == "tokenizer.json" else name_or_path
    if Path(name).suffix == ".tiktoken":
        return _from_file(Path(name))
    if Path(name).is_dir():
        return HuggingFaceTokenizer(name)
    raise UserError(
        f"tokenizer {name_or_path!r} is unknown; give {BYTE_TOKENIZER!r}, {CL100K!r}, a .tiktoken "
        "file, or a Hugging Face folder with tokenizer.json and tokenizer_config.json"
    )


def vocabulary_size(name_or_path: str) -> int:
    """Return a tokenizer's highest id plus one, including special tokens.

    The file of ``cl100k_base`` loads slowly, so it is not read.
    """
    if name_or_path == CL100K:
        return max(CL100K_SPECIAL_TOKENS.values()) + 1
    return load_tokenizer(name_or_path).vocab_size


def check_vocabulary(tokenizer: str, used: int, rows: int) -> None:
    """Raise a UserError if a tokenizer has more ids (``used``) than an embedding has ``rows``.

    ``rows`` does not count the padding rows of the embedding (``model.vocab_padding``).
    """
    if used > rows:
        raise UserError(
            f"the tokenizer {tokenizer!r} uses {used} ids, but model.vocab_size less "
            f"model.vocab_padding is {rows}; raise model.vocab_size by at least {used - rows}, to "
            "a multiple of parallel.tensor"
        )


def find_cl100k() -> Path:
    """Find ``cl100k_base.tiktoken`` in the folder $DIFFMEGATRON_TIKTOKEN or in tiktoken's cache."""
    variables = (SEARCH_VARIABLE, "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR")
    folders = [Path(os.environ[variable]) for variable in variables if os.environ.get(variable)]
    for folder in (*folders, Path(tempfile.gettempdir()) / "data-gym-cache"):
        for path in (folder / f"{CL100K}.tiktoken", folder / CL100K_CACHE_NAME):
            if path.is_file():
                return path
    raise UserError(
        f"tokenizer {CL100K}: {CL100K}.tiktoken (sha256 {CL100K_FILE_SHA256}) is not on this "
        f"machine; put it into a folder and name the folder in {SEARCH_VARIABLE}, or give "
        "the path of the file as the tokenizer"
    )


def _from_file(path: Path, *, is_cl100k: bool = False) -> Tokenizer:
    content = read_bytes(path)
    sha256 = hashlib.sha256(content).hexdigest()
    if is_cl100k and sha256 != CL100K_FILE_SHA256:
        raise UserError(
            f"tokenizer file {path} has sha256 {sha256}, but {CL100K} is {CL100K_FILE_SHA256}; "
            "copy the file again"
        )
    ranks = _parse_ranks(path, content)
    name, pattern = str(path), CL100K_PATTERN
    special_tokens = {END_OF_TEXT: max(ranks.values()) + 1}
    description = path.with_suffix(".json")
    if sha256 == CL100K_FILE_SHA256:
        name, special_tokens = CL100K, CL100K_SPECIAL_TOKENS
    elif os.path.lexists(description):
        pattern, special_tokens = _read_description(description, set(ranks.values()))
    try:
        encoding = tiktoken.Encoding(
            Path(name).stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )
    except ValueError as error:
        raise UserError(
            f"{format_path(description)} has a pat_str that cannot be used: {shorten(str(error))}"
        ) from None
    tokenizer = TiktokenTokenizer(name, encoding, special_tokens[END_OF_TEXT])
    tokenizer.can_hang = pattern != CL100K_PATTERN
    return tokenizer


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Return the rank of each token of a ``.tiktoken`` file with lines ``base64(token) rank``."""
    try:
        pairs = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        ranks = {}
    if not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise UserError(
            f"tokenizer file {format_path(path)} is not a tiktoken file: it must have a line "
            "'base64(token) rank' for each token, the 256 bytes among them"
        )
    ids = set(ranks.values())
    if len(ids) < len(ranks) or min(ids) < 0 or max(ids) >= _MAX_ID:
        raise UserError(
            f"tokenizer file {format_path(path)} is damaged: its ranks must differ, from 0 to "
            f"{_MAX_ID - 1}; copy the file again"
        )
    return ranks


def _read_description(path: Path, used: set[int]) -> tuple[str, dict[str, int]]:
    """Read the split pattern and the special tokens; refuse special tokens with ids in ``used``."""
    description: _Description = read_json(path, _Description)
    special_tokens = description.special_tokens
    ids = set(special_tokens.values())
    if END_OF_TEXT not in special_tokens or len(ids) < len(special_tokens) or ids & used:
        raise UserError(
            f"{format_path(path)} must give {END_OF_TEXT!r} among its special_tokens, and each of "
            "them an id that no other token has"
        )
    return description.pat_str, special_tokens
