"""Sections ``parallel`` and ``recompute``: parallel layout and recomputed activations."""

from typing import Literal, Self

from pydantic import Field, model_validator

from diffmegatron.section import RankCount, Section, Size


class ParallelConfig(Section):
    """Parallel layout. Data-parallel size: number of ranks / (tensor x context x pipeline)."""

    tensor: RankCount = Field(default=1, description="ranks that share the matrices of each layer")
    pipeline: RankCount = Field(default=1, description="ranks that share the layers")
    virtual_pipeline: Size = Field(
        default=1, description="virtual stages per pipeline rank; above 1: interleaved 1F1B"
    )
    context: RankCount = Field(default=1, description="ranks that share each sequence")
    context_communication: Literal["auto", "ring", "all_gather", "ulysses"] = Field(
        default="auto",
        description="auto: ulysses if the ranks divide the key-value heads, otherwise ring",
    )
    sequence_parallel: bool = Field(
        default=False, description="share norms and hidden states over the tensor-parallel ranks"
    )
    zero_stage: Literal[1, 2, 3] = Field(
        default=1, description="shard: 1 optimizer state, 2 also gradients, 3 also weights"
    )
    offload_optimizer: bool = Field(
        default=False, description="keep master weights and Adam's moments in host memory"
    )
    overlap_gradients: bool | None = Field(
        default=None,
        description="sum gradients over ranks during the last microbatch's backward pass; null: "
        "if that is possible (ZeRO 1 on the device, without pipeline)",
    )

    @property
    def overlaps_gradients(self) -> bool:
        """Whether gradients are summed over ranks during the last microbatch's backward pass."""
        if self.overlap_gradients is not None:
            return self.overlap_gradients
        return self.pipeline == 1 and self.zero_stage == 1 and not self.offload_optimizer

    @property
    def model_ranks(self) -> int:
        """Number of ranks of one data-parallel replica: tensor x context x pipeline."""
        return self.tensor * self.context * self.pipeline

    @model_validator(mode="after")
    def _combines(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "parallel.sequence_parallel is on with parallel.tensor 1; it shards over the "
                "tensor-parallel ranks, so give parallel.tensor of at least 2 or turn it off"
            )
        if self.pipeline > 1 and self.zero_stage > 1:
            wrong = "deadlock" if self.zero_stage == 3 else "not partition the gradients"
            raise ValueError(
                f"parallel.zero_stage {self.zero_stage} with parallel.pipeline {self.pipeline} "
                f"would {wrong}; the nearest layouts that work are parallel.zero_stage 1, or "
                "parallel.pipeline 1"
            )
        if self.overlap_gradients:
            self._check_overlap()
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline {self.virtual_pipeline} interleaves virtual stages of "
                "pipeline ranks, and parallel.pipeline is 1; give parallel.pipeline of at least 2 "
                "or parallel.virtual_pipeline 1"
            )
        if self.context_communication != "auto" and self.context == 1:
            raise ValueError(
                f"parallel.context_communication is {self.context_communication!r} with "
                "parallel.context 1, where no ranks share a sequence; give parallel.context of at "
                "least 2 or 'auto'"
            )
        return self

    def _check_overlap(self) -> None:
        for name, value, needed in (
            ("pipeline", self.pipeline, 1),
            ("zero_stage", self.zero_stage, 1),
            ("offload_optimizer", self.offload_optimizer, False),
        ):
            if value != needed:
                raise ValueError(
                    f"parallel.overlap_gradients is on with parallel.{name} {str(value).lower()}; "
                    "gradients can be summed during the backward pass with ZeRO 1 on the device "
                    f"without pipeline, so give parallel.{name} {str(needed).lower()} or leave "
                    "parallel.overlap_gradients out"
                )


class RecomputeConfig(Section):
    """Activations that Megatron-core recomputes in the backward pass instead of saving them.

    ``selective`` recomputes the core attention: scores, softmax and the product with the values.

    ``full`` recomputes whole layers. The method ``uniform`` recomputes all layers in groups of
    ``layers``, and saves only the input of each group. The method ``block`` recomputes the first
    ``layers`` layers of each virtual stage.
    """

    granularity: Literal["none", "selective", "full"] = Field(
        default="none", description="selective: compute attention twice; full: whole layers"
    )
    method: Literal["uniform", "block"] = Field(
        default="uniform", description="block: only the first layers of each virtual stage"
    )
    layers: Size = Field(
        default=1, description="layers of a group (uniform), or of each virtual stage (block)"
    )

    @model_validator(mode="after")
    def _layers_belong_to_full(self) -> Self:
        is_default = self.method == "uniform" and self.layers == 1
        if self.granularity != "full" and not is_default:
            raise ValueError(
                f"recompute.method {self.method!r} and recompute.layers {self.layers} apply to "
                f"whole layers, and recompute.granularity is {self.granularity!r}; give 'full', or "
                "leave both out (the defaults are 'uniform' and 1)"
            )
        return self
