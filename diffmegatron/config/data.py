"""The ``data`` section of a recipe: tokenizer, sources and their weights, held-out split."""

from pydantic import Field

from diffmegatron.config.base import Section


class Source(Section):
    """One prepared corpus (``PREFIX.bin``, ``PREFIX.idx``, ``PREFIX.json``) and its weight."""

    path: str
    weight: float = Field(default=1.0, ge=0)


class DataConfig(Section):
    """What is read, in which shares, and how much of it is held out."""

    tokenizer: str = "cl100k_base"
    sources: tuple[Source, ...] = Field(min_length=1)
    validation_fraction: float = Field(default=0.001, ge=0, lt=1)
