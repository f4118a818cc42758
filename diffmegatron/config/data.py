"""The ``data`` section of a recipe: tokenizer, sources and their weights, held-out splits."""

from typing import Self

from pydantic import Field, model_validator

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
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    split_seed: int = Field(default=1234, ge=0, description="which documents are held out")
    cache_dir: str | None = Field(default=None, description="null: PREFIX.cache, per source")

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        held_out = self.validation_fraction + self.test_fraction
        if held_out >= 1:
            raise ValueError(
                f"data.validation_fraction {self.validation_fraction:g} and data.test_fraction "
                f"{self.test_fraction:g} leave no document to train on; their sum must be below 1"
            )
        if not sum(source.weight for source in self.sources):
            weights = [source.weight for source in self.sources]
            raise ValueError(f"the weights of data.sources are {weights}; one must be above zero")
        return self
