"""A Hugging Face chat template that matches the training data, and the tokenizer for it.

``diffmegatron prepare`` encodes ChatML prompts and responses separately, so no token spans their
boundary. Hugging Face encodes a chat as one text. The exported tokenizer must therefore split the
text at these boundaries.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.prepare.record_formats import segments
from diffmegatron.data.tokenizers import CHAT_END, CHAT_START, encode_whole_texts
from diffmegatron.data.tokenizers import Tokenizer as TrainingTokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import shorten

CHAT_TEMPLATE = f"""\
{{%- for message in messages -%}}
{{{{- '{CHAT_START}' + message['role'] + '\\n' + message['content'] + '{CHAT_END}' -}}}}
{{%- if message['role'] == 'assistant' and loop.last and not add_generation_prompt -%}}
{{{{- eos_token -}}}}
{{%- else -%}}
{{{{- '\\n' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '{CHAT_START}assistant\\n' -}}}}
{{%- endif -%}}
"""
# The tokenizer splits a chat before and after each match. If the ChatML markers are ordinary text,
# a match is a response and its <|im_end|>. If the markers are special tokens, the tokenizer has
# already split the text at the markers. A match is then the "assistant\n" before a response.
_RESPONSE = r"(?<=<\|im_start\|>assistant\n)[\s\S]*?<\|im_end\|>|\Aassistant\n"
_TEXTS = (
    "What is 12345 + 1?",
    "12346",
    "def f(x):\n\treturn x\n\n",
    "",
    "Grüße, 日本語, e\u0301 \U0001f926\U0001f3fd",
    "the end. ",
)
_ROLES = ("system", "user", "assistant", "user", "assistant")
_CHATML = PrepareSettings(layout="chat")


def split_responses(tokenizer: Tokenizer) -> None:
    """Make a tokenizer split each chat before and after each response, as ``prepare`` does."""
    split = pre_tokenizers.Split(Regex(_RESPONSE), "isolated")
    before = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, *([before] if before else [])])


def load_exported(directory: Path) -> Any:
    """Load an export's tokenizer with ``AutoTokenizer``, without running code from the folder."""
    loaded = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    if loaded.is_fast:
        # transformers turns off truncation and padding for each text, but not BPE's dropout.
        encode_whole_texts(loaded.backend_tokenizer)
    return loaded


def check_chat(tokenizer: TrainingTokenizer, directory: Path, before_response: str = "") -> None:
    """Check that an export and ``prepare`` encode sample chats as the same ids.

    ``before_response`` is a text to insert before every response of the sample chats.
    """
    exported = load_exported(directory)
    # verbose=True would warn of chats longer than a small model's seq_length.
    options = {"return_dict": False, "tokenizer_kwargs": {"verbose": False}}
    chat: list[dict[str, str]] = []
    for turn in range(30):
        role, text = _ROLES[turn % len(_ROLES)], _TEXTS[turn % len(_TEXTS)]
        if role != "assistant":
            chat.append({"role": role, "content": text})
            continue
        chat.append({"role": role, "content": before_response + text})
        parts = [tokenizer.encode_chat(part) for part in segments({"messages": chat}, _CHATML)]
        expected = [*np.concatenate(parts).tolist(), tokenizer.end_of_document]
        ids = exported.apply_chat_template(chat, **options)
        if ids != expected:
            raise UserError(
                "the chat template gives other ids than the tokenizer of training for "
                f"{shorten(repr(chat))}, {first_difference(ids, expected)}"
            )


def first_difference(ids: list[int], expected: list[int]) -> str:
    """Describe the first difference of two unequal lists of token ids."""
    pairs = enumerate(itertools.zip_longest(ids, expected))
    first = next(place for place, (one, other) in pairs if one != other)
    return f"{ids[first : first + 4]} instead of {expected[first : first + 4]} at place {first}"
