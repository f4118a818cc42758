"""The options of ``evaluate`` on the command line and in Python.

This module imports torch only within functions, so that ``--help`` stays fast.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diffmegatron.errors import UserError

if TYPE_CHECKING:
    from diffmegatron.evaluation.targets import Target

# Default values of `batch_tokens`. On a CPU, batches make generation faster but not scoring, so the
# limit of 1 puts each scoring request into its own batch.
_CPU_SCORING, _CPU_GENERATION, _GPU = 1, 4096, 65_536


@dataclass(frozen=True)
class EngineSettings:
    """Device, precision and engine of a model."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            help="Dtype of the weights (auto: the files' dtype on a GPU, float32 on a CPU)"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU if there is one")
    ] = "auto"
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="Library that runs the models; vllm does not show attention"),
    ] = "transformers"

    def __post_init__(self) -> None:
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise UserError(
                    "--device cuda needs a GPU, and torch finds none; give --device cpu"
                )

    @property
    def is_gpu(self) -> bool:
        """True if the networks run on a GPU."""
        import torch

        return self.device != "cpu" and torch.cuda.is_available()

    def dtype_of(self, target: "Target") -> str:
        """Return the name of the dtype that a target's weights have in memory, such as float32."""
        import torch

        if self.dtype != "auto":
            return self.dtype
        in_files = getattr(target.config, "dtype", None) or torch.float32
        return str(in_files).removeprefix("torch.") if self.is_gpu else "float32"


@dataclass(frozen=True)
class Computing(EngineSettings):
    """Device, precision, engine and batch size of an evaluation.

    ``batch_tokens`` limits the tokens of a batch, including padding and tokens to generate. A
    request with more tokens is a batch by itself.
    """

    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of tokens of a batch  [default: auto]"),
    ] = None

    def tokens(self, *, is_generation: bool) -> int:
        """Return ``batch_tokens``, or the default for generation or scoring on this device."""
        on_cpu = _CPU_GENERATION if is_generation else _CPU_SCORING
        return self.batch_tokens or (_GPU if self.is_gpu else on_cpu)


@dataclass(frozen=True)
class GenerateSettings(EngineSettings):
    """The options of ``generate``; ``temperature`` 0 selects the most likely token."""

    max_tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of new tokens per prompt")
    ] = 256
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the most likely token, 1 samples")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of the samples")] = 0
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Prompts are a user's messages, in the chat template"),
    ] = False


@dataclass(frozen=True)
class EvaluateSettings(Computing):
    """The options of :class:`Computing`, and the paths of data that several suites use."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="Held-out text: JSONL, Parquet or text files, folders, or a prepared PREFIX",
        ),
    ] = None
    haystack: Annotated[
        Path | None, typer.Option(help="Text to hide needles in, in the same formats")
    ] = None
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the files of published data sets")
    ] = None

    def suite_fields(self) -> dict[str, Any]:
        """Return the options ``data``, ``haystack`` and ``data_dir`` that have a value."""
        given = {
            "data": tuple(self.data or ()) or None,
            "haystack": self.haystack and Path(self.haystack),
            "data_dir": self.data_dir and Path(self.data_dir),
        }
        return {name: value for name, value in given.items() if value is not None}
