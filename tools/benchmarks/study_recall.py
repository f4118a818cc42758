"""Generate a corpus of multi-query associative recall; equal arguments give equal files.

    python -m tools.benchmarks study_recall runs/studies/recall

The task is that of Arora et al., Zoology (2023). A document lists D pairs of a key and a value, and
then the same pairs in another order. Keys differ within a document; values may repeat. Keys and
values are drawn uniformly, and D is drawn uniformly from ``--pairs``. OUT gets

    tokenizer/        one token for each key and each value
    train.jsonl       documents as prompt (the pairs) and response (the pairs again)
    train.bin, .idx, .json  the prepared corpus; prompts do not count in the loss
    held_out.jsonl    further documents as texts, for the suite associative-recall
"""

import argparse
from random import Random

from tokenizers import Tokenizer, models, pre_tokenizers

from diffmegatron import prepare
from diffmegatron.data.tokenizers import END_OF_TEXT
from tools.benchmarks.corpus_files import write_json_lines, write_tokenizer

Pair = tuple[str, str]


def main(arguments: argparse.Namespace) -> None:
    """Write the tokenizer, the corpus and the held-out texts."""
    out, random = arguments.out, Random(arguments.seed)
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(make_tokenizer(arguments.keys), out / "tokenizer")
    drawn = [
        draw(random, random.choice(arguments.pairs), arguments.keys)
        for _ in range(arguments.documents + arguments.held_out)
    ]
    training, held_out = drawn[: arguments.documents], drawn[arguments.documents :]
    write_json_lines(
        out / "train.jsonl", ({"prompt": one, "response": two} for one, two in training)
    )
    write_json_lines(out / "held_out.jsonl", ({"text": f"{one} {two}"} for one, two in held_out))
    manifest = prepare(
        [out / "train.jsonl"],
        out / "train",
        str(out / "tokenizer"),
        layout="instruction",
        show_progress=False,
    )
    print(
        f"{out}: {manifest.documents:,} documents of {manifest.tokens:,} tokens to train on, "
        f"{len(held_out):,} held out; content {manifest.content}"
    )


def draw(random: Random, pairs: int, keys: int) -> Pair:
    """Return two texts: the random pairs of a document, and the same pairs in another order.

    Args:
        random: source of random numbers.
        pairs: number of pairs in the document.
        keys: number of keys, and of values, from which the pairs are drawn.
    """
    stated = [
        (f"k{key}", f"v{random.randrange(keys)}") for key in random.sample(range(keys), pairs)
    ]
    asked = random.sample(stated, pairs)
    return tuple(" ".join(word for pair in part for word in pair) for part in (stated, asked))


def make_tokenizer(keys: int) -> Tokenizer:
    """Return a tokenizer with one token for each key and each value."""
    words = [END_OF_TEXT, *(f"{kind}{number}" for kind in "kv" for number in range(keys))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
