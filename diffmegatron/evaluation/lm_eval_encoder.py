"""Encode lm-eval's requests for a network, and decode the network's answers.

Importing this module imports lm-eval (the extra ``evaluation``).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.harness import Question
from diffmegatron.evaluation.requests import Generation, Request, Scoring
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path, shorten
from diffmegatron.hf.chat_template import load_exported


class Encoder(TemplateLM):
    """Encoder of lm-eval's requests into token ids, and decoder of a network's answers.

    The methods that split a prompt and a continuation into tokens are inherited from lm-eval.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        try:
            self.tokenizer: Any = load_exported(target.folder)
        except Exception as error:  # transformers raises errors of any type here.
            raise UserError(
                f"{format_path(target.folder)} has no tokenizer that transformers can load: "
                f"{shorten(str(error))}"
            ) from None
        self.context = resolve_max_length(target.config, self.tokenizer)

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token put before a scored text that has no prompt.

        It is the start token, or the end token if the tokenizer has no start token.
        """
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the token ids of a text."""
        if add_special_tokens is None:
            # Add special tokens, unless a chat template has already written the start token.
            start = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not has_bos_prefix(string, start)
        return self.tokenizer.encode(string, verbose=False, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages as a prompt with the tokenizer's chat template."""
        render = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return render(chat_history)
        except TemplateError:
            # Some templates do not accept a system message. Leave it out, as lm-eval does.
            return render([each for each in chat_history if each["role"] != "system"])

    def length(self, question: Question) -> int:
        """Return the number of tokens of the longest answer, or 0 if it fits the target's context.

        An answer is a choice (continuation to score), or a generated text plus one prompt token.
        Other prompt tokens do not count, because a long prompt is cut at its beginning.
        """
        kind, needed = question.instances[0].request_type, 0
        if kind == "generate_until":
            needed = max(_decoding(each)["max_gen_toks"] + 1 for each in question.instances)
        elif kind == "loglikelihood":
            for prompt, choice in question.arguments:
                # Encode only choices with more than `self.context` bytes. Others fit, because a
                # token has at least one byte. lm-eval moves spaces at the prompt's end to the
                # choice, so count them too.
                if len(prompt.encode()) - len(prompt.rstrip().encode()) + len(choice.encode()) > (
                    self.context
                ):
                    needed = max(needed, len(self._pairs([(prompt, choice)])[0][1]))
        return needed if needed > self.context else 0

    def requests(self, question: Question) -> tuple[list[Request], dict[str, bool]]:
        """Return the requests of a question, and two notes on its prompts for the record.

        ``cut``: a prompt was cut at its beginning. ``joined``: one token spans a prompt and its
        whole choice. lm-eval stops there; the choice is then encoded by itself. Consecutive
        continuations of the same context are one request.
        """
        kind, joined = question.instances[0].request_type, False
        if kind == "generate_until":
            return self._generations(question)
        if kind == "loglikelihood":
            if ("", "") in question.arguments:
                raise _empty_choice(question)
            pairs = self._pairs(question.arguments)
            for place, (before, after) in enumerate(pairs):
                if not after:
                    pairs[place] = before, self._encode_choice(question, place)
                    joined = True
        else:
            pairs = [pair for (text,) in question.arguments for pair in self._windows(text)]
        # The network does not process the last token of a continuation. A context and its
        # continuation may therefore have `self.context` + 1 tokens together.
        fitting, cut = [], False
        for before, after in pairs:
            most = self.context + 1 - len(after)
            fitting.append((before[-most:] or [self.prefix_token_id], after))
            cut = cut or len(before) > most
        groups = groupby(fitting, key=itemgetter(0))
        requests: list[Request] = [
            Scoring(context, [after for _, after in group]) for context, group in groups
        ]
        return requests, {"cut": cut, "joined": joined}

    def answers(self, question: Question, computed: Sequence[Any]) -> list[Any]:
        """Return a network's answers to :meth:`requests` in the form that lm-eval's models use."""
        kind = question.instances[0].request_type
        if kind == "generate_until":
            return [
                self._text(instance, tokens)
                for instance, tokens in zip(question.instances, computed, strict=True)
            ]
        # Log-likelihood in nats, and whether greedy decoding produces the continuation.
        likelihoods = [
            (-float(scored.losses.double().sum()), bool(scored.is_most_likely.all()))
            for scored in chain.from_iterable(computed)
        ]
        if kind == "loglikelihood":
            return likelihoods
        left = iter(likelihoods)
        return [sum(next(left)[0] for _ in self._windows(text)) for (text,) in question.arguments]

    def _pairs(self, arguments: Sequence[tuple[Any, ...]]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each context and continuation, as lm-eval splits them."""
        instances = [Instance("loglikelihood", {}, each, 0) for each in arguments]
        return list(self.loglikelihood(instances, disable_tqdm=True))

    # lm-eval's ``loglikelihood`` calls this method to score the ids. Here it returns them.
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: object
    ) -> Any:
        return [(before, after) for _, before, after in requests]

    def _encode_choice(self, question: Question, place: int) -> list[int]:
        """Return the ids of a choice by itself, with the spaces that end its prompt."""
        prompt, choice = question.arguments[place]
        spaces = prompt[len(prompt.rstrip()) :]
        if ids := self.tok_encode(spaces + choice, add_special_tokens=False):
            return ids
        raise _empty_choice(question)

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, self.context, 1
        )
        return map(make_disjoint_window, windows)

    def _generations(self, question: Question) -> tuple[list[Request], dict[str, bool]]:
        requests: list[Request] = []
        cut = False
        for instance in question.instances:
            limit = _decoding(instance)["max_gen_toks"]
            ids = self.tok_encode(instance.args[0])
            most = self.context - limit
            cut = cut or len(ids) > most
            fitting = ids[-most:] or [self.prefix_token_id]
            requests.append(Generation(fitting, limit, self._stops(instance)))
        return requests, {"cut": cut, "joined": False}

    def _stops(self, instance: Instance) -> tuple[str, ...]:
        eos = self.tokenizer.decode(self.eot_token_id)
        return tuple(filter(None, handle_stop_sequences(_decoding(instance)["until"], eos)))

    def _text(self, instance: Instance, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return postprocess_generated_text(text, list(self._stops(instance)), None)

    # lm-eval's class declares these methods as abstract, and only its own evaluator calls them.
    @override
    def generate_until(self, *_: object, **__: object) -> Any:
        raise NotImplementedError("an encoder only encodes; call answers")

    loglikelihood_rolling = generate_until


def _decoding(instance: Instance) -> Any:
    return normalize_gen_kwargs(instance.args[1], DEFAULT_MAX_GEN_TOKS)


def _empty_choice(question: Question) -> UserError:
    return UserError(
        f"question {question.number} of task {question.task!r} has an empty choice, which has no "
        "likelihood; correct the task's data, or leave out the task"
    )
