"""DEX: differential extension of a pretrained softmax attention (Kong, Jang, Kwak, NeurIPS 2025).

arXiv 2505.16333, figure 9. O is the output of a selected head for a token, a row vector of width d:

    O' = O - lambda(t) O W_D
    lambda(t) = (1 - a) (t / T) lambda_init + a lambda_learn,    a = min(1, t / T)

In all other heads O' = O. t is the number of completed optimizer steps, and T the number of steps
of the annealing. Layer l, counted from 1, has lambda_init = 0.8 - 0.6 exp(-0.3 (l - 1)), a trained
matrix W_D [d, d] and a trained number lambda_learn. O' is linear in O, so the export is a plain
Transformer. W [d, hidden_size] is the part of the output projection that multiplies O'. The export
has (I - lambda W_D) W in place of W.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, model_validator
from typing_extensions import override

from diffmegatron.files import shorten
from diffmegatron.section import FREE, Count, Section

from .kind import AttentionKind, Foundation
from .lambda_init import LambdaInit
from .layer import Constant, Context, Identity, Layer, Parameter
from .selected_heads import (
    MAY_BE_MISSING,
    SelectedHeads,
    SelectedOn,
    Unselected,
    assumed_heads,
    read_selected,
)
from .softmax import Softmax, transformer_of

if TYPE_CHECKING:
    from torch import Tensor

PROJECTION, LAMBDA_LEARN = "dex_projection", "lambda_learn"


class ProjectionInit(Section):
    """Initial values of W_D; the paper does not state them.

    ``scale`` is the standard deviation of the kind ``normal``, or the factor of the identity matrix
    in the kind ``identity``.
    """

    kind: Literal["zero", "normal", "identity"] = Field(
        default="zero", description="initial values of W_D"
    )
    scale: float | None = Field(
        default=None, gt=0, description="standard deviation, or factor of the identity"
    )

    @model_validator(mode="after")
    def _scale_belongs_to_the_others(self) -> Self:
        if (self.kind == "zero") != (self.scale is None):
            raise ValueError(
                f"model.attention.projection_init.scale is {self.scale} with kind {self.kind!r}; "
                "give one with 'normal' and 'identity', and none with 'zero'"
            )
        return self

    @property
    def values(self) -> float | Constant | Identity:
        """Initial values in the form of :attr:`Parameter.initial`."""
        if self.scale is None:
            return Constant(0.0)
        return self.scale if self.kind == "normal" else Identity(self.scale)


class Dex(Softmax):
    """Softmax attention whose ``selected_heads`` have a differential term.

    ``selected_heads`` has the numbers of each layer's selected query heads, from 0. A recipe may
    instead have the path of a file that ``diffmegatron dex select`` wrote. ``annealing_steps`` is
    T; null means that lambda is lambda_learn from the first step.

    Without annealing, lambda_learn and W_D both stay zero if both start at zero, because the
    gradient of each is proportional to the other.
    """

    kind: Literal["dex"] = "dex"  # type: ignore[assignment]
    selected_heads: SelectedHeads = Field(
        description="heads with the DEX term: a file of dex select, or head numbers by layer"
    )
    selected_on: Annotated[SelectedOn | None, FREE] = Field(
        default=None, description="model on which dex select has selected the heads"
    )
    annealing_steps: Annotated[Count | None, FREE] = Field(
        description="steps over which lambda_learn is blended in; null: none"
    )
    projection_init: Annotated[ProjectionInit, FREE] = ProjectionInit()
    lambda_learn_init: Annotated[float, FREE] = Field(
        default=0.1, description="initial value of lambda_learn"
    )

    title: ClassVar[str] = "Transformer with DEX"

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, section: Any, info: ValidationInfo) -> Any:
        """Replace a path in ``selected_heads`` by the content of the file.

        Without a validation context, which the reader of recipes gives, no file is read.
        """
        file = section.get("selected_heads") if isinstance(section, dict) else None
        if not isinstance(file, str) or info.context is None:
            return section
        return {**section, **read_selected(file, may_be_missing=info.context[MAY_BE_MISSING])}

    @override
    def check(self, num_layers: int) -> None:
        made = self.selected_on
        if made is not None and made.num_heads != self.num_heads:
            raise ValueError(
                f"model.attention.selected_heads were selected on a model of {made.num_heads} "
                f"heads and num_heads is {self.num_heads}; select them on the model that the run "
                "starts with"
            )
        if self.output_gate is not None:
            raise ValueError(
                f"model.attention.output_gate is {self.output_gate!r} with kind 'dex', whose term "
                "is exported in the output projection, after the gate; give null"
            )
        if isinstance(self.selected_heads, Unselected):
            return
        if not any(self.selected_heads):
            raise ValueError(
                "model.attention.selected_heads selects no head; give the numbers of some in at "
                "least one layer"
            )
        for layer, heads in enumerate(self.selected_heads, start=1):
            are_rising = list(heads) == sorted({*heads})
            if not are_rising or not all(0 <= head < self.num_heads for head in heads):
                raise ValueError(
                    f"model.attention.selected_heads of layer {layer} are {shorten(str([*heads]))};"
                    f" give numbers from 0 to {self.num_heads - 1}, rising, each once"
                )
        if len(self.selected_heads) != num_layers:
            raise ValueError(
                f"model.attention.selected_heads has {len(self.selected_heads)} layers and "
                f"model.num_layers is {num_layers}; give a list of heads for every layer"
            )

    @override
    def foundation(self) -> Foundation:
        made = self.selected_on
        return Foundation(transformer_of(self), None if made is None else made.fingerprint)

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> Self:
        """Return a copy of this section for the small network that ``plan --rehearse`` runs.

        In every layer, the first half of the heads is selected.
        """
        half = tuple(range(assumed_heads(sizes["num_heads"])))
        heads = {"selected_heads": (half,) * num_layers, "selected_on": None}
        return self.model_copy(update={**sizes, **heads})

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the parameters of softmax attention, and W_D and lambda_learn."""
        square = (self.head_dim, self.head_dim)
        return (
            *super().parameters(hidden_size),
            Parameter(PROJECTION, square, self.projection_init.values, "matrix"),
            Parameter(LAMBDA_LEARN, (1,), Constant(self.lambda_learn_init), "lambda", float32=True),
        )

    @override
    def current_lambda(self, layer: Layer) -> "Tensor":
        learned = layer.parameter(LAMBDA_LEARN)[0]
        return annealed_lambda(self.annealing_steps, layer.layer_number, layer.step, learned)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        """Return O' of the selected heads and O of the others, [b, s, heads of this rank, d].

        A split selects the heads, because an index tensor would be copied to the device in each
        layer. A rank without selected heads also uses W_D, which needs a gradient on every rank.
        """
        import torch

        heads = super().forward(layer, context, query, key, value, from_hidden)
        lengths = self._runs(layer)
        # The axis order [s, b, ...] determines the last bits of the gradient of W_D. Earlier
        # versions had this order, and their runs must resume to the same numbers.
        parts = list(heads.transpose(0, 1).split(lengths, dim=2))
        selected = torch.cat(parts[1::2], dim=2)
        projection = (self.current_lambda(layer) * layer.parameter(PROJECTION)).to(selected.dtype)
        extended = selected - selected @ projection
        parts[1::2] = extended.split(lengths[1::2], dim=2)
        return torch.cat(parts, dim=2).transpose(0, 1)

    def _runs(self, layer: Layer) -> list[int]:
        """Return the lengths of the runs of unselected and of selected heads on this rank.

        The runs alternate: unselected, selected, ..., unselected, selected. The first and the last
        length may be 0.
        """
        selected = {*selected_in(self, layer.layer_number)}
        flags = (head in selected for head in layer.share(self.num_heads))
        # With one more flag at each end, the first run is unselected and the last is selected.
        lengths = [len([*run]) for _, run in groupby([False, *flags, True])]
        lengths[0] -= 1
        lengths[-1] -= 1
        return lengths


def assumptions(kinds: Iterable[AttentionKind]) -> Iterator[str]:
    """Yield a sentence for ``plan`` about heads that are assumed while their file is missing."""
    for kind in kinds:
        if isinstance(kind, Dex) and isinstance(kind.selected_heads, Unselected):
            yield kind.selected_heads.assumption(kind.num_heads)


def annealed_lambda(
    annealing_steps: int | None, layer: int, step: int, learned: "Tensor"
) -> "Tensor":
    """Return lambda of layer ``layer`` (from 1) after ``step`` steps; ``learned`` is trained."""
    if annealing_steps is None:
        return learned
    passed = step / annealing_steps
    a = min(1.0, passed)
    return (1 - a) * passed * LambdaInit().of_layer(layer) + a * learned


def selected_in(kind: Dex, layer: int) -> tuple[int, ...]:
    """Return the selected heads of a layer, as numbers from 0.

    ``layer`` is the number of the layer, counted from 1 over all pipeline stages.
    """
    if isinstance(kind.selected_heads, Unselected):
        raise kind.selected_heads.error()
    return kind.selected_heads[layer - 1]
