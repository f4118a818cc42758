"""The ``data`` section of a recipe: tokenizer, weighted sources and held-out splits."""

import math
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from diffmegatron.files import shorten
from diffmegatron.section import PathText, Section, Seed, Size


def _prefix(path: str) -> str:
    """Replace ``PREFIX.parts``, the folder of a corpus prepared in parts, by PREFIX."""
    named = PurePath(path)
    return str(named.with_suffix("")) if named.suffix == ".parts" else path


def _folder(path: str) -> str:
    """Replace the path of a ``tokenizer.json`` by its folder; return any other path as it is."""
    named = PurePath(path)
    return str(named.parent) if named.name == "tokenizer.json" else path


class Source(Section):
    """A prepared corpus (``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``) and its weight."""

    path: Annotated[PathText, AfterValidator(_prefix)] = Field(
        description="PREFIX of prepare, or PREFIX.parts of merged parts"
    )
    weight: float = Field(default=1.0, ge=0, description="relative share of the tokens")


class Upsampling(Section):
    """Length up-sampling (Fu et al., arXiv 2402.10171): a larger share of long documents.

    Documents with fewer than ``long_tokens`` tokens are kept with the probability ``keep_short``.
    ``per_source`` preserves the share of tokens of each source. ``global`` raises the shares of
    sources with long documents.
    """

    mode: Literal["none", "per_source", "global"] = Field(
        default="none", description="per_source: keep the share of tokens of every source"
    )
    long_tokens: Size = Field(default=4096, description="tokens from which a document is long")
    keep_short: float = Field(
        default=0.1, ge=0, le=1, description="probability that a shorter document is kept"
    )


class DataConfig(Section):
    """Sources of the training data and their weights, packing, and the held-out splits."""

    tokenizer: Annotated[PathText, AfterValidator(_folder)] = Field(
        default="cl100k_base",
        description="tokenizer of the sources: cl100k_base, bytes, a .tiktoken file, or a Hugging "
        "Face folder",
    )
    sources: tuple[Source, ...] = Field(
        min_length=1, max_length=128, description="prepared corpora and their weights"
    )
    validation_fraction: float = Field(
        default=0.001, ge=0, lt=1, description="share of the documents; 0: no held-out loss"
    )
    test_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="share of the documents for test/loss at the end"
    )
    split_seed: Seed = Field(default=1234, description="seed of the choice of held-out documents")
    packing: Literal["concatenate", "best_fit", "none"] = Field(
        default="concatenate", description="how documents fill sequences; none: one each"
    )
    upsampling: Upsampling = Upsampling()
    on_exhausted: Literal["repeat", "stop"] = Field(
        default="repeat", description="at the end of a source: read it again, or end the run"
    )
    reset_attention_mask: bool | None = Field(
        default=None,
        description="attention stays within a document; null: if a packed source has chats",
    )
    eod_mask_loss: bool = Field(
        default=False, description="no loss across document ends, also if attention continues there"
    )
    verify: Literal["sizes", "hashes"] = Field(
        default="sizes", description="hashes: read every source completely before a run starts"
    )
    cache_dir: PathText | None = Field(default=None, description="null: PREFIX.cache, per source")

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        held_out = self.validation_fraction + self.test_fraction
        if held_out >= 1:
            raise ValueError(
                f"data.validation_fraction {self.validation_fraction:g} and data.test_fraction "
                f"{self.test_fraction:g} leave no document to train on; their sum must be below 1"
            )
        weights = [source.weight for source in self.sources]
        if not 0 < sum(weights) < math.inf:
            raise ValueError(
                f"the weights of data.sources are {shorten(str(weights))}; one must be above zero, "
                "and their sum a finite number"
            )
        return self
