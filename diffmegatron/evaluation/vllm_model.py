"""vLLM's offline interface in place of transformers, for suites that only have texts written."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from diffmegatron.attention.variants import of_model_type
from diffmegatron.errors import UserError
from diffmegatron.evaluation.model import Computing, Model
from diffmegatron.evaluation.requests import Answer, Generation, Request
from diffmegatron.evaluation.suite import Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import clipped, shown


class VllmModel(Model):
    """A target that vLLM serves on one GPU, loaded at the first request.

    vLLM makes the batches itself, and does not say where numbers are not finite.
    """

    @cached_property
    def network(self) -> PreTrainedModel:
        """Raise an error: vLLM has a network of its own, which nothing looks into."""
        raise UserError(f"{self.target.name} is in vLLM; give --engine transformers")

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield the number of each request and its new tokens, in order.

        Raises:
            UserError: vLLM does not load the model, or a request is not for free text.
        """
        sampling_params = _vllm().SamplingParams
        end = self.target.tokenizer.end_of_document
        prompts, settings = [], []
        for request in requests:
            if not isinstance(request, Generation) or request.labels is not None:
                raise UserError(
                    "vLLM is only asked for free text here, not for likelihoods or labels; give "
                    "--engine transformers"
                )
            prompts.append({"prompt_token_ids": list(request.ids)})
            settings.append(
                sampling_params(
                    temperature=0.0,
                    max_tokens=request.limit,
                    stop=list(request.stop) or None,
                    # Alone, so that texts end where those of transformers do.
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
        except Exception as error:  # vLLM raises whatever its parts raise
            raise UserError(
                f"vLLM does not load {shown(self.target.folder)}: {clipped(str(error))}; give "
                "--engine transformers"
            ) from None


def check_served(
    suites: Sequence[Suite], targets: Sequence[Target], computing: Computing, ranks: int
) -> None:
    """Check, before anything runs, that vLLM is there and serves what is asked for.

    Raises:
        UserError: it is not or does not.
    """
    _vllm()
    if ranks > 1 or computing.device != "auto" or computing.batch_tokens is not None:
        raise UserError(
            "--engine vllm runs in one process and chooses device and batches itself; leave out "
            "the launcher, --device and --batch-tokens"
        )
    for suite in suites:
        if not suite.only_writes:
            raise UserError(
                f"suite {suite.name!r} needs more of a model than texts, which is all that vLLM is "
                "asked for here; run it with --engine transformers"
            )
    for target in targets:
        # vLLM knows others that are not known here.
        is_known = of_model_type(target.config.model_type) is not None
        layers = target.config.num_hidden_layers
        if is_known and any(kind.map_pairs for kind, _ in target.variant.by_kind(layers)):
            raise UserError(
                f"{shown(target.path)} is of model_type {target.config.model_type!r}, which vLLM "
                "does not serve; give --engine transformers"
            )


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"--engine vllm needs vLLM, which does not load here ({error}); install it, or give "
            "--engine transformers"
        ) from None
    return vllm
