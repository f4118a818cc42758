"""The chats of ``prepare`` (ChatML) as a chat template, and a tokenizer that gives their ids.

``prepare`` encodes what a model reads and what it learns apart, so no token lies across the two.
A template is encoded as one text, so the tokenizer has to cut that text at the same places.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from diffmegatron.data.prepare.record_formats import Fields, segments
from diffmegatron.data.tokenizers import CHAT_END, CHAT_START
from diffmegatron.data.tokenizers import Tokenizer as TrainingTokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import clipped

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
# The first where the markers are text, the second where they are tokens, which are cut out before.
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


def split_responses(tokenizer: Tokenizer) -> None:
    """Have a tokenizer cut a chat where ``prepare`` does: before and after each response."""
    split = pre_tokenizers.Split(Regex(_RESPONSE), "isolated")
    before = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, *([before] if before else [])])


def load_exported(directory: Path) -> Any:
    """Return the tokenizer of an export as its users load it; no code of the folder is run."""
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def check_chat(tokenizer: TrainingTokenizer, directory: Path, before_response: str = "") -> None:
    """Compare the ids of an exported chat template with those of prepared chats.

    Args:
        tokenizer: that prepared them.
        directory: of the export.
        before_response: what each response begins with.

    Raises:
        UserError: they differ.
    """
    exported = load_exported(directory)
    roles, texts = itertools.cycle(_ROLES), itertools.cycle(_TEXTS)
    chat: list[dict[str, str]] = []
    for role, text in itertools.islice(zip(roles, texts, strict=False), 30):
        response = role == "assistant"
        chat.append({"role": role, "content": before_response + text if response else text})
        if response:
            _check(chat, tokenizer, exported)


def _check(chat: list[dict[str, str]], tokenizer: TrainingTokenizer, exported: Any) -> None:
    parts = [tokenizer.encode_chat(text) for text in segments({"messages": chat}, Fields("chat"))]
    expected = [*np.concatenate(parts).tolist(), tokenizer.end_of_document]
    # Not verbose: the chats are longer than a small model's seq_length, which is no trouble.
    ids = exported.apply_chat_template(chat, return_dict=False, tokenizer_kwargs={"verbose": False})
    if ids != expected:
        pairs = enumerate(itertools.zip_longest(ids, expected))
        place = next(place for place, (one, other) in pairs if one != other)
        raise UserError(
            f"the chat template gives {ids[place : place + 4]} at place {place} of "
            f"{clipped(repr(chat))} and the training's tokenizer {expected[place : place + 4]}"
        )
