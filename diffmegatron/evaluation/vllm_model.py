"""Answers to requests by vLLM's offline interface instead of ``transformers``."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.answers import WrittenText, check_finite
from diffmegatron.evaluation.model import Computing, Model
from diffmegatron.evaluation.requests import Answer, Generation, Request, Scored, Scoring
from diffmegatron.evaluation.suite import Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path, shorten
from diffmegatron.hf.kinds import is_served
from diffmegatron.hf.modeling import remote_files
from diffmegatron.hf.write_export import has_own_code

# Kinds of RoPE whose angles do not depend on max_position_embeddings.
_ROPE_OF_ANY_LENGTH = ("default", "linear", "llama3")


class VllmModel(Model):
    """A target's network in vLLM on one GPU or a CPU, loaded at the first request.

    vLLM forms the batches itself. In generated texts, it does not report NaN or infinity.
    """

    @override
    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        indexed = list(enumerate(requests))
        yield from self._score([(n, each) for n, each in indexed if isinstance(each, Scoring)])
        texts = [(n, each) for n, each in indexed if isinstance(each, Generation)]
        yield from self._generate([(n, each) for n, each in texts if each.labels is None])
        yield from self._choose([(n, each) for n, each in texts if each.labels is not None])

    @override
    def stream(
        self, ids: Sequence[int], count: int, temperature: float, seed: int
    ) -> Iterator[int]:
        params = _vllm().SamplingParams(
            temperature=temperature, seed=seed, max_tokens=count, ignore_eos=True
        )
        engine, seen = self._llm.llm_engine, 0
        request = engine.add_request("stream", {"prompt_token_ids": list(ids)}, params)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens = output.outputs[0].token_ids
                    yield from tokens[seen:]
                    seen = len(tokens)
        finally:
            # The caller may stop before the last token.
            engine.abort_request([request])

    def _score(self, requests: Sequence[tuple[int, Scoring]]) -> Iterator[tuple[int, Answer]]:
        rows = [(each.context, more) for _, each in requests for more in each.continuations]
        outputs = iter(
            self._run(
                [[*context, *more] for context, more in rows],
                [{"prompt_logprobs": 0, "max_tokens": 1}] * len(rows),
            )
        )
        for number, (context, continuations) in requests:
            scored = []
            for ids in continuations:
                places = next(outputs).prompt_logprobs[len(context) :]
                found = [place[token] for place, token in zip(places, ids, strict=True)]
                losses = torch.tensor([-each.logprob for each in found])
                scored.append(Scored(losses, torch.tensor([each.rank == 1 for each in found])))
            yield number, check_finite(scored, len(context))

    def _generate(self, requests: Sequence[tuple[int, Generation]]) -> Iterator[tuple[int, Answer]]:
        end = self.target.tokenizer.end_of_document
        options = [
            {
                "max_tokens": each.limit,
                "stop": list(each.stop) or None,
                # Ignore other end tokens of the model's configuration, so that texts end at the
                # same token as with transformers.
                "stop_token_ids": [end],
                "ignore_eos": True,
                "skip_special_tokens": False,
            }
            for _, each in requests
        ]
        outputs = self._run([each.ids for _, each in requests], options)
        for (number, _), output in zip(requests, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            yield number, tokens[:-1] if tokens[-1:] == [end] else tokens

    def _choose(self, requests: Sequence[tuple[int, Generation]]) -> Iterator[tuple[int, Answer]]:
        """Yield the ids of the labels, which all requests generate one token at a time."""
        texts = [WrittenText(each) for _, each in requests]
        while left := [text for text in texts if not text.has_ended]:
            prompts = [[*text.request.ids, *text.found] for text in left]
            allowed = [sorted(text.labels or ()) for text in left]
            options = [{"allowed_token_ids": each, "max_tokens": 1} for each in allowed]
            outputs = self._run(prompts, options)
            for text, output in zip(left, outputs, strict=True):
                text.add(output.outputs[0].token_ids[0], self.target.tokenizer)
        for (number, _), text in zip(requests, texts, strict=True):
            yield number, text.answer

    def _run(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> Any:
        """Return vLLM's outputs of prompts of token ids, with decoding options for each prompt."""
        if not prompts:
            return []
        settings = [_vllm().SamplingParams(temperature=0.0, **each) for each in options]
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        try:
            return self._llm.generate(inputs, settings, use_tqdm=False)
        except ValueError as error:  # For example, vLLM refuses prompts that are too long.
            raise UserError(
                f"vLLM cannot answer for {self.target.name}: {shorten(str(error))}; give --engine "
                "transformers"
            ) from None

    @cached_property
    def _llm(self) -> Any:
        config, context = self.target.config, self.target.context
        rope = getattr(config, "rope_parameters", None) or {}
        overrides = {}
        if rope.get("rope_type", "default") in _ROPE_OF_ANY_LENGTH and context < torch.inf:
            # To score the token after a full context, vLLM needs this token in the prompt, and a
            # place for a generated one.
            overrides["max_position_embeddings"] = int(context) + 2
        try:
            return _vllm().LLM(
                model=str(self.target.folder),
                dtype=self.computing.dtype_of(self.target),
                seed=0,
                trust_remote_code=has_own_code(self.target.folder),
                hf_overrides=overrides,
            )
        except Exception as error:  # vLLM raises errors of any type here.
            raise UserError(
                f"vLLM cannot load {format_path(self.target.folder)}: {shorten(str(error))}; give "
                "--engine transformers"
            ) from None


def check_served(
    suites: Sequence[Suite], targets: Sequence[Target], computing: Computing, ranks: int
) -> None:
    """Check that vLLM is installed, and supports the suites, targets and options."""
    check_options(computing, ranks)
    for suite in suites:
        if suite.reads_attention or suite.needs_network or suite.reads_runs:
            raise UserError(
                f"suite {suite.name!r} does not send requests to an engine; run it with --engine "
                "transformers"
            )
    for target in targets:
        check_target(target)


def check_options(computing: Computing, ranks: int = 1) -> None:
    """Raise UserError if vLLM is not installed, or chooses by itself what an option sets."""
    _vllm()
    if ranks > 1 or computing.device != "auto" or computing.batch_tokens is not None:
        raise UserError(
            "--engine vllm runs in one process and chooses device and batches itself; leave out "
            "the launcher, --device and --batch-tokens"
        )


def check_target(target: Target) -> None:
    """Raise UserError if vLLM cannot compute the attention of a target."""
    name, config = format_path(target.path), target.config
    if not is_served(config.model_type):
        raise UserError(
            f"{name} has model_type {config.model_type!r}, whose layers have two attention calls, "
            "and vLLM serves one; export the checkpoint again with --serving, or give --engine "
            "transformers"
        )
    if remote_files(config.model_type) and not has_own_code(target.folder):
        raise UserError(
            f"{name} contains other code than this version's for model_type "
            f"{config.model_type!r}, which is not run; export the checkpoint again, or give "
            "--engine transformers"
        )
    kinds = getattr(config, "layer_kinds", ())
    heads = {(each["num_attention_heads"], each["num_key_value_heads"]) for each in kinds}
    if len(heads) > 1:
        raise UserError(
            f"{name} has layers whose attention calls have {sorted(heads)} query and key-value "
            "heads, and vLLM serves one size; give --engine transformers"
        )


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"--engine vllm needs vLLM, which cannot be imported ({error}); install it, or give "
            "--engine transformers"
        ) from None
    return vllm
