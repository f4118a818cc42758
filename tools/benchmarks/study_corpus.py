"""Split, tokenize and prepare a text for studies; the same text always gives the same files.

    python -m tools.benchmarks study_corpus runs/studies/text runs/studies/english

TEXT is any input of ``diffmegatron prepare``. OUT gets

    train.jsonl, held_out.jsonl  pieces of the text; a hash of a piece selects its file
    tokenizer/                   a byte-level BPE tokenizer, trained on train.jsonl
    train.bin, .idx, .json       the prepared corpus

Long documents are split at empty lines, and each piece is held out or not. Without the split, a
source of few long documents could have no held-out text.
"""

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from diffmegatron import prepare
from diffmegatron.data.tokenizers import END_OF_TEXT
from diffmegatron.evaluation.text import read_texts
from tools.benchmarks.corpus_files import write_json_lines, write_tokenizer

# Maximum number of characters in a piece. Only a piece of a single paragraph may be longer, because
# paragraphs are not split.
_CHARACTERS = 8_000


def main(arguments: argparse.Namespace) -> None:
    """Write the pieces, the tokenizer and the corpus."""
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    pieces = list(
        chain.from_iterable(map(cut, chain.from_iterable(map(read_texts, arguments.texts))))
    )
    training = [piece for piece in pieces if not is_held_out(piece, arguments.held_out)]
    held_out = [piece for piece in pieces if is_held_out(piece, arguments.held_out)]
    write_json_lines(out / "train.jsonl", ({"text": piece} for piece in training))
    write_json_lines(out / "held_out.jsonl", ({"text": piece} for piece in held_out))
    write_tokenizer(train_tokenizer(training, arguments.vocabulary), out / "tokenizer")
    manifest = prepare(
        [out / "train.jsonl"], out / "train", str(out / "tokenizer"), show_progress=False
    )
    print(
        f"{out}: {manifest.documents:,} pieces of {manifest.tokens:,} tokens to train on, "
        f"{len(held_out):,} pieces held out; content {manifest.content}"
    )


def cut(text: str) -> Iterator[str]:
    """Split a document between paragraphs into pieces of about ``_CHARACTERS`` characters."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > _CHARACTERS:
            yield piece
            piece = ""
        piece += f"\n\n{paragraph}" if piece else paragraph
    yield piece


def is_held_out(piece: str, share: float) -> bool:
    """Return whether a piece is held out, which depends only on its content."""
    digest = hashlib.sha256(piece.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of ``vocabulary`` tokens, trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
