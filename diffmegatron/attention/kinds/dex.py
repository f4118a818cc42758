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

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from diffmegatron.files import shorten
from diffmegatron.section import Count, Section

from . import hugging_face as hf
from .diff_v1 import LambdaInit
from .kind import Kernels
from .layer import Constant, Context, Identity, Layer, Parameter
from .selected_heads import SelectedHeads, SelectedOn, Unselected, assumed_heads, read_selected
from .softmax import Softmax

if TYPE_CHECKING:
    from torch import Tensor

PROJECTION, LAMBDA_LEARN = "dex_projection", "lambda_learn"


class ProjectionInit(Section):
    """Initial values of W_D; the paper does not state them.

    ``scale`` is the standard deviation of the kind ``normal``, or the factor of the identity matrix
    in the kind ``identity``.
    """

    kind: Literal["zero", "normal", "identity"] = "zero"
    scale: float | None = Field(default=None, gt=0)

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

    can_mix: ClassVar[bool] = False
    kind: Literal["dex"] = "dex"  # type: ignore[assignment]
    selected_heads: SelectedHeads
    selected_on: SelectedOn | None = None
    annealing_steps: Count | None
    projection_init: ProjectionInit = ProjectionInit()
    lambda_learn_init: float = 0.1

    title: ClassVar[str] = "Transformer with DEX"
    # An export has plain softmax attention, so no model type is imported as DEX.
    model_types: ClassVar[tuple[str, ...]] = ()
    free_keys: ClassVar[frozenset[str]] = frozenset(
        {"annealing_steps", "projection_init", "lambda_learn_init", "selected_on"}
    )

    @classmethod
    def with_files(
        cls, section: Mapping[str, Any], *, may_be_missing: bool = False
    ) -> Mapping[str, Any]:
        """Replace a path in ``selected_heads`` by the content of the file."""
        file = section.get("selected_heads")
        if not isinstance(file, str):
            return section
        return {**section, **read_selected(file, may_be_missing=may_be_missing)}

    @property
    @override
    def assumption(self) -> str | None:
        heads = self.selected_heads
        return heads.assumption(self.num_heads) if isinstance(heads, Unselected) else None

    @override
    def check(self) -> None:
        super().check()
        made = self.selected_on
        if made is not None and made.num_heads != self.num_heads:
            raise ValueError(
                f"model.attention.selected_heads were selected on a model of {made.num_heads} "
                f"heads and num_heads is {self.num_heads}; select them on the model that the run "
                "starts with"
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

    @override
    def check_layers(self, num_layers: int) -> None:
        heads = self.selected_heads
        if not isinstance(heads, Unselected) and len(heads) != num_layers:
            raise ValueError(
                f"model.attention.selected_heads has {len(heads)} layers and "
                f"model.num_layers is {num_layers}; give a list of heads for every layer"
            )

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> Self:
        """Return a copy of this section for the small network that ``plan --rehearse`` runs.

        In every layer, the first half of the heads is selected.
        """
        half = tuple(range(assumed_heads(sizes["num_heads"])))
        heads = {"selected_heads": (half,) * num_layers, "selected_on": None}
        return self.model_copy(update={**sizes, **heads})

    def baseline(self) -> Softmax:
        """Return the same softmax attention without the differential term."""
        shared = {name: getattr(self, name) for name in Softmax.model_fields if name != "kind"}
        return Softmax.model_construct(**shared)

    @override
    def foundation(self) -> Softmax:
        return self.baseline()

    @property
    @override
    def fingerprint(self) -> str | None:
        return None if self.selected_on is None else self.selected_on.fingerprint

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the parameters of softmax attention, and W_D and lambda_learn."""
        square = (self.head_dim, self.head_dim)
        return (
            *super().parameters(hidden_size),
            Parameter(PROJECTION, square, self.projection_init.values, "matrix"),
            Parameter(LAMBDA_LEARN, (1,), Constant(self.lambda_learn_init), "lambda", float32=True),
        )

    def own_products(self, hidden_size: int) -> float:
        """Return the multiply-adds per token and layer of O W_D, as a mean over all layers."""
        return self._selected_per_layer * self.head_dim**2

    @override
    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        projected, core = super().saved_bytes(kernels)
        # The differential term saves a copy of the selected heads' O.
        saved = self._selected_per_layer * self.head_dim
        if not self.headwise_norm and not kernels.copies_softmax_output:
            # `super` counts O once, for the kernel and the output projection. With the term, the
            # output projection saves O' instead.
            saved += self.heads.query_channels
        return projected, core + kernels.element * saved

    @property
    def _selected_per_layer(self) -> float:
        if isinstance(self.selected_heads, Unselected):
            return assumed_heads(self.num_heads)
        return sum(map(len, self.selected_heads)) / len(self.selected_heads)

    @override
    def current_lambda(self, layer: Layer) -> "Tensor":
        learned = layer.parameter(LAMBDA_LEARN)[0]
        return self._lambda(layer.layer_number, layer.step, learned)

    def _lambda(self, layer: int, step: int, learned: "Tensor") -> "Tensor":
        if self.annealing_steps is None:
            return learned
        passed = step / self.annealing_steps
        a = min(1.0, passed)
        return (1 - a) * passed * LambdaInit().of_layer(layer) + a * learned

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        """Return O' of the selected heads and O of the others, [b, s, heads of this rank, d].

        A split selects the heads, because an index tensor would be copied to the device in each
        layer. A rank without selected heads also uses W_D, which needs a gradient on every rank.
        """
        import torch

        heads = super().forward(layer, context, query, key, value, gate)
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
        selected = {*self._selected(layer.layer_number)}
        flags = (head in selected for head in layer.share(self.num_heads))
        # With one more flag at each end, the first run is unselected and the last is selected.
        lengths = [len([*run]) for _, run in groupby([False, *flags, True])]
        lengths[0] -= 1
        lengths[-1] -= 1
        return lengths

    def _selected(self, layer: int) -> tuple[int, ...]:
        """Return the selected heads of a layer, as numbers from 0.

        ``layer`` is the number of the layer, counted from 1 over all pipeline stages.
        """
        if isinstance(self.selected_heads, Unselected):
            raise self.selected_heads.error()
        return self.selected_heads[layer - 1]

    def layer_rules(
        self, ours: str, theirs: str, hidden_size: int, *, layer: int, step: int
    ) -> list[hf.WeightRule]:
        """Return the rules that map a layer's attention weights to a plain Transformer and back.

        The export multiplies (I - lambda W_D) into the output projection, in float64. The weight of
        this projection is stored transposed, [hidden_size, heads * d]. The inverse rule sets W_D
        and lambda_learn to zero.
        """
        name, d = f"{ours}.linear_proj.weight", self.head_dim
        selected = self._selected(layer)

        def fold(weight: "Tensor", projection: "Tensor", learned: "Tensor") -> tuple["Tensor", ...]:
            by_head = weight.double().unflatten(1, (-1, d)).clone()
            change = self._lambda(layer, step, learned).double() * projection.double()
            for head in selected:
                by_head[:, head] -= by_head[:, head] @ change.T
            return (by_head.flatten(1),)

        def unfold(weight: "Tensor") -> tuple["Tensor", ...]:
            return weight, weight.new_zeros(d, d), weight.new_zeros(1)

        rules = super().weight_rules(ours, theirs, hidden_size)
        (output,) = (rule for rule in rules if name in rule.ours)
        folded = {
            **output.ours,
            f"{ours}.{PROJECTION}": (d, d),
            f"{ours}.{LAMBDA_LEARN}": (1,),
        }
        rules[rules.index(output)] = hf.WeightRule(folded, output.theirs, fold, unfold)
        return rules
