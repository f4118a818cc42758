"""Generation of texts by vLLM's offline interface instead of ``transformers``."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.head_maps import maps_of
from diffmegatron.evaluation.model import Computing, Model
from diffmegatron.evaluation.requests import Answer, Generation, Request
from diffmegatron.evaluation.suite import Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path, shorten
from diffmegatron.hf.kinds import model_types


class VllmModel(Model):
    """A target's network in vLLM on one GPU, loaded at the first request.

    vLLM forms the batches itself. It does not report NaN or infinity in its logits.
    """

    @override
    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        sampling_params = _vllm().SamplingParams
        end = self.target.tokenizer.end_of_document
        prompts, settings = [], []
        for request in requests:
            if not isinstance(request, Generation) or request.labels is not None:
                raise UserError(
                    "--engine vllm supports free text only, not likelihoods or labels; give "
                    "--engine transformers"
                )
            prompts.append({"prompt_token_ids": list(request.ids)})
            settings.append(
                sampling_params(
                    temperature=0.0,
                    max_tokens=request.limit,
                    stop=list(request.stop) or None,
                    # Ignore other end tokens of the model's configuration, so that texts end at the
                    # same token as with transformers.
                    stop_token_ids=[end],
                    ignore_eos=True,
                    skip_special_tokens=False,
                )
            )
        for number, output in enumerate(self._llm.generate(prompts, settings, use_tqdm=False)):
            tokens = list(output.outputs[0].token_ids)
            yield number, tokens[:-1] if tokens[-1:] == [end] else tokens

    @cached_property
    def _llm(self) -> Any:
        try:
            return _vllm().LLM(
                model=str(self.target.folder),
                dtype=self.computing.dtype_of(self.target),
                seed=0,
                trust_remote_code=False,
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
    _vllm()
    if ranks > 1 or computing.device != "auto" or computing.batch_tokens is not None:
        raise UserError(
            "--engine vllm runs in one process and chooses device and batches itself; leave out "
            "the launcher, --device and --batch-tokens"
        )
    for suite in suites:
        if not suite.requests_only_free_text:
            raise UserError(
                f"suite {suite.name!r} needs more than generated texts, which --engine vllm does "
                "not support; run it with --engine transformers"
            )
    for target in targets:
        # Refuse only kinds of attention that subtract attention maps; vLLM may support all others.
        config = target.config
        layers = range(config.num_hidden_layers)
        is_known = config.model_type in model_types()
        if is_known and any(maps_of(config, target.attention, layer).pairs for layer in layers):
            raise UserError(
                f"{format_path(target.path)} has model_type {target.config.model_type!r}, which "
                "vLLM does not support; give --engine transformers"
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
