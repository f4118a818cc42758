"""Files of the studies' corpora: JSON lines and tokenizers."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from diffmegatron.data.tokenizers import END_OF_TEXT


def write_json_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    """Write each record on a line of its own."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer as a Hugging Face folder; ``END_OF_TEXT`` is its end-of-text token."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
