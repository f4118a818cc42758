"""Train a byte-level BPE tokenizer: train_tokenizer.py TEXTS FOLDER TOKENS."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.prepare.record_formats import UnusableError, parse

DOCUMENTS = 200_000
MAX_BYTES = 1 << 20


def texts(folder: Path) -> Iterator[str]:
    """Yield the texts of the files of a folder, as ``diffmegatron prepare`` reads them."""
    settings = PrepareSettings()
    for file in find_files([folder], "*"):
        for record in read_records(file, settings.columns, MAX_BYTES):
            try:
                yield parse(record, file.format, settings)["text"]
            except UnusableError:
                continue  # prepare lists it among the rejects.


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder."""
    source, folder, tokens = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        islice(texts(source), DOCUMENTS), vocab_size=tokens, special_tokens=["<|endoftext|>"]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written last, because speedrun.sh trains again if it is missing.
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


if __name__ == "__main__":
    main()
