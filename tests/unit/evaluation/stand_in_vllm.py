"""Stand-in for vLLM's offline interface, with the names and semantics of vLLM's documentation.

For each token, the stand-in runs transformers on the whole text. It does not use code of this
project.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

__version__ = "of the stand-in"


@dataclass
class SamplingParams:
    """Decoding options of one prompt: the fields of vLLM's class that diffmegatron uses."""

    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclass
class CompletionOutput:
    """One generated text.

    If a stop string ended the text, ``token_ids`` includes this string and ``text`` does not.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class RequestOutput:
    """Result for one prompt, with the texts generated after it."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """Stand-in for vLLM's class of this name: a loaded model that generates texts."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        seed: int | None = None,
        trust_remote_code: bool = False,
        hf_overrides: dict[str, object] | None = None,
    ) -> None:
        kind = getattr(torch, dtype)
        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
        self._tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self._eos = self._network.config.eos_token_id

    def generate(
        self,
        prompts: list[dict[str, list[int]]],
        sampling_params: list[SamplingParams],
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the outputs in the order of the prompts."""
        return [
            RequestOutput(str(number), prompt["prompt_token_ids"], [self._write(prompt, params)])
            for number, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True))
        ]

    @torch.no_grad()
    def _write(self, prompt: dict[str, list[int]], params: SamplingParams) -> CompletionOutput:
        assert params.temperature == 0
        found: list[int] = []
        while len(found) < params.max_tokens:
            ids = torch.tensor([[*prompt["prompt_token_ids"], *found]])
            token = int(self._network(ids).logits[0, -1].argmax())
            found.append(token)
            text = self._tokenizer.decode(found, skip_special_tokens=params.skip_special_tokens)
            if token in params.stop_token_ids or (token == self._eos and not params.ignore_eos):
                return CompletionOutput(0, text, found, "stop", token)
            for stop in params.stop or ():
                if stop in text:
                    return CompletionOutput(0, text.split(stop)[0], found, "stop", stop)
        return CompletionOutput(0, text, found, "length", None)
