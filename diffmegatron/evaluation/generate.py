"""``diffmegatron generate``: print what a model writes after a prompt, token by token."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from diffmegatron.data.tokenizers import CHAT_END
from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate_settings import Computing, GenerateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.targets import Target, find_targets
from diffmegatron.evaluation.vllm_model import VllmModel, check_options, check_target
from diffmegatron.files import format_path
from diffmegatron.hf.chat_template import load_exported


def written_texts(path: Path, prompts: Sequence[str], settings: GenerateSettings) -> Iterator[str]:
    """Yield parts of the texts of all prompts as soon as they are complete.

    Without a chat template, a text begins with its prompt. A line break ends each text. A
    checkpoint is exported to a temporary folder first.

    Args:
        path: Hugging Face folder, checkpoint, or run_dir, whose newest checkpoint is used.
        prompts: beginnings of texts, or messages of a user with ``settings.chat``.

    Raises:
        UserError: the target is not a model, a prompt does not fit its context, or the target has
            no chat template for ``settings.chat``.
    """
    with ExitStack() as stack:
        exports = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        is_vllm = settings.engine == "vllm"
        (target,) = find_targets([path], exports, serving=is_vllm)
        computing = Computing(settings.dtype, settings.device, settings.engine)
        if is_vllm:
            check_options(computing)
            check_target(target)
        target.check_vocabulary()
        model = (VllmModel if is_vllm else Model)(target, computing)
        for prompt in prompts:
            ids, stop = _encode(target, prompt, is_chat=settings.chat)
            if len(ids) >= target.context:
                raise UserError(
                    f"a prompt has {len(ids):,} tokens and {target.name} a context of "
                    f"{target.context:,.0f}; give a shorter prompt"
                )
            count = int(min(settings.max_tokens, target.context - len(ids)))
            tokens = islice(model.stream(ids, count, settings.temperature, settings.seed), count)
            if not settings.chat:
                yield prompt
            yield from _parts(tokens, target, stop)
            yield "\n"


def _encode(target: Target, prompt: str, *, is_chat: bool) -> tuple[list[int], str | None]:
    """Return the token ids of a prompt, and the text that ends the answer."""
    if not is_chat:
        return target.encode(prompt) or [target.start_token], None
    tokenizer = load_exported(target.folder)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {format_path(target.path)} has no chat template; leave out --chat"
        )
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return ids, CHAT_END if CHAT_END in str(tokenizer.chat_template) else None


def _parts(tokens: Iterator[int], target: Target, stop: str | None) -> Iterator[str]:
    """Yield the text of tokens in parts, up to an end token or the text ``stop``."""
    ends: Any = target.config.eos_token_id
    ends = {target.tokenizer.end_of_document, *(ends if isinstance(ends, list) else [ends])}
    found: list[int] = []
    shown, text = 0, ""
    for token in tokens:
        if token in ends:
            break
        found.append(token)
        text = target.tokenizer.decode(found)
        if stop is not None and stop in text:
            text = text.partition(stop)[0]
            break
        # Wait for the rest of a character, and for what could be the beginning of `stop`.
        held = len(text) - len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        held = max([held, *(n for n in range(len(stop or "")) if text.endswith(str(stop)[:n]))])
        if len(text) - held > shown:
            yield text[shown : len(text) - held]
            shown = len(text) - held
    yield text[shown:]
