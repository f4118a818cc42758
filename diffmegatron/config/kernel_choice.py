"""The choice of kernels for ``training.attention_backend: auto``, from a machine's measurements."""

from typing import NamedTuple

from diffmegatron.attention.kernels.registry import Call, choose_backend, find_backend, why_not
from diffmegatron.attention.kinds.kind import AttentionKind, kind_in_words
from diffmegatron.config.attention_backend import (
    attention_call,
    attention_shape,
    layer_backend,
    loss_shape,
    subtraction_shape,
    why_not_loss,
)
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.config.training_config import ChosenKernels, KindKernels
from diffmegatron.errors import UserError
from diffmegatron.measurements.records import KernelShape, Measurements

_ORDER = "auto's order, without a measurement of this shape on this machine"
_TUNE = "'diffmegatron tune CONFIG' makes one"


class Surroundings(NamedTuple):
    """Circumstances in which a run chooses its kernels.

    Attributes:
        device: device type of the run.
        libraries: usable optional libraries.
        measured: measurements of this machine, or None.
        saved: recipe of the checkpoint from which the run resumes, or None.
        chip: major compute capability of the GPU; None on other devices.
    """

    device: str
    libraries: frozenset[str]
    measured: Measurements | None = None
    saved: RecipeSections | None = None
    chip: int | None = None


class Choice(NamedTuple):
    """Kernels of a run, None if the recipe names its backend; and lines for the log."""

    kernels: ChosenKernels | None
    lines: tuple[str, ...]


def choose_kernels(recipe: RecipeSections, here: Surroundings) -> Choice:
    """Return the kernels of a run: those of its checkpoint, or the fastest that are right.

    Without a measurement of a shape, the order of ``auto`` applies. A backend that was wrong for
    any shape of its operation and dtype on this machine is not chosen.

    Raises:
        UserError: no backend can run, or none is right.
    """
    named = recipe.training.attention_backend
    if not _records_fit(recipe if here.saved is None else here.saved):
        if here.saved is not None:
            raise UserError(
                "training.chosen_kernels in the checkpoint's recipe does not fit its "
                "model.attention; use another checkpoint"
            )
        recipe = _without_record(recipe)
    kinds, lines = [], []
    for number, kind in enumerate(recipe.model.attention.kinds):
        before = _before(number, kind, here)
        if named == "auto":
            found, reason = _choose(recipe, number, kind, here)
            kinds.append(found)
            name = found.attention
        else:
            name, reason = named, "named by the recipe"
        if before not in (None, name):
            lines.append(
                f"attention of {kind_in_words(kind)}: {name} instead of {before} ({reason}), so "
                "the last bits of the next losses differ"
            )
        elif before is None and named == "auto":
            lines.append(f"attention of {kind_in_words(kind)}: {name} ({reason})")
    lines = list(dict.fromkeys(lines))
    if not kinds:
        return Choice(None, tuple(lines))
    loss, line = _loss(recipe, here)
    if line is not None:
        lines.append(line)
    values = {"device": here.device, "kinds": kinds, "loss": loss}
    chosen = ChosenKernels.model_validate(values)
    return Choice(chosen, tuple(lines))


def _records_fit(recipe: RecipeSections) -> bool:
    """Return whether a recipe has no recorded kernels, or such that fit its kinds of attention.

    A recipe that extends the one of an earlier run may have other kinds.
    """
    recorded, kinds = recipe.training.chosen_kernels, recipe.model.attention.kinds
    if recorded is None:
        return True
    names = [each.attention for each in recorded.kinds]
    return len(names) == len(kinds) and all(
        find_backend(kind.operation, name) for name, kind in zip(names, kinds, strict=True)
    )


def _without_record(recipe: RecipeSections) -> RecipeSections:
    training = recipe.training.model_copy(update={"chosen_kernels": None})
    return recipe.model_copy(update={"training": training})


def _before(number: int, kind: AttentionKind, here: Surroundings) -> str | None:
    """Return the backend of a kind before the run was interrupted; None in a new run."""
    if here.saved is None:
        return None
    training = here.saved.training
    if training.attention_backend != "auto":
        return training.attention_backend
    if training.chosen_kernels is not None:
        return training.chosen_kernels.kinds[number].attention
    return layer_backend(here.saved, kind, here.device, here.libraries, here.chip)[0]


def _choose(
    recipe: RecipeSections, number: int, kind: AttentionKind, here: Surroundings
) -> tuple[KindKernels, str]:
    """Return the kernels of a kind, and the reason for the log."""
    before = (here.saved or recipe).training
    if before.attention_backend != "auto" or (before.chosen_kernels is None and not here.saved):
        return _new_choice(recipe, kind, here)
    if before.chosen_kernels is None:
        # The checkpoint is of a version that did not record the choice, and chose by the order.
        return _in_order(recipe, kind, here)
    kept, device = before.chosen_kernels.kinds[number], before.chosen_kernels.device
    call = attention_call(recipe, kind, here.device, here.chip)
    problem = why_not(kept.attention, call, here.libraries)
    if device != here.device:
        problem = f"was chosen on {device}"
    if problem is None:
        return kept, kept.origin
    found, reason = _new_choice(recipe, kind, here)
    return found, f"{kept.attention} {problem}; {reason}"


def _new_choice(
    recipe: RecipeSections, kind: AttentionKind, here: Surroundings
) -> tuple[KindKernels, str]:
    """Return the fastest right kernels of a kind; without a measurement, those of the order."""
    if here.measured is None:
        return _in_order(recipe, kind, here)
    shape = attention_shape(recipe, kind)
    name = _fastest(shape, here)
    if name is None:
        return _in_order(recipe, kind, here)
    found, machine = here.measured.of_shape(shape), here.measured.machine
    assert found is not None
    right = sum(each.seconds is not None for each in found.candidates)
    origin = (
        f"fastest of {right} right backends, measured {found.measured_at} on {machine.name}, key "
        f"{machine.digest}"
    )
    return _kernels(name, _subtraction(recipe, kind, here), origin), origin


def _in_order(
    recipe: RecipeSections, kind: AttentionKind, here: Surroundings
) -> tuple[KindKernels, str]:
    name = _first(attention_call(recipe, kind, here.device, here.chip), here)
    found = _kernels(name, _subtraction(recipe, kind, here), _ORDER)
    return found, f"{_ORDER}; {_TUNE}"


def _kernels(attention: str, subtraction: str, origin: str) -> KindKernels:
    values = {"attention": attention, "subtraction": subtraction, "origin": origin}
    return KindKernels.model_validate(values)


def _subtraction(recipe: RecipeSections, kind: AttentionKind, here: Surroundings) -> str:
    """Return the backend of DIFF V2's subtraction; "auto" without a measurement."""
    shape = None if here.measured is None else subtraction_shape(recipe, kind)
    if shape is None:
        return "auto"
    if (fastest := _fastest(shape, here)) is not None:
        return fastest
    call = Call("subtraction", here.device, shape.dtype, shape.head_dim, chip=here.chip)
    return _first(call, here) if _wrong("subtraction", shape.dtype, here) else "auto"


def _loss(recipe: RecipeSections, here: Surroundings) -> tuple[str, str | None]:
    """Return the loss kernel of the checkpoint, or the fastest that is right; and a line or None.

    Without a measurement of the shape, it is "auto", unless the Triton kernel was wrong here.
    """
    before = (here.saved or recipe).training.chosen_kernels
    if before is not None and before.device == here.device:
        problem = why_not_loss(before.loss, here.device, here.libraries)
        if problem is None:
            return before.loss, None
        return "megatron", (
            f"training.chosen_kernels.loss {before.loss!r} {problem}, so the loss is computed by "
            "'megatron', and the last bits of the next losses differ"
        )
    shape = loss_shape(recipe)
    fastest = None if here.saved else _fastest(shape, here)
    is_wrong = "triton" in _wrong("loss", shape.dtype, here)
    return fastest or ("megatron" if is_wrong else "auto"), None


def _fastest(shape: KernelShape, here: Surroundings) -> str | None:
    """Return the fastest right backend that can run; None if the shape was not measured."""
    found = None if here.measured is None else here.measured.of_shape(shape)
    fastest = None if found is None else found.fastest
    return None if fastest is None else fastest.backend


def _first(call: Call, here: Surroundings) -> str:
    """Return the first backend in the order of ``auto`` that can run and was not wrong here."""
    wrong = _wrong(call.op, call.dtype, here)
    try:
        return choose_backend("auto", call, here.libraries, wrong)[0]
    except ValueError as error:
        raise UserError(f"training.attention_backend: {error}") from None


def _wrong(op: str, dtype: str, here: Surroundings) -> frozenset[str]:
    """Return the backends that were wrong on this machine for any shape of this dtype."""
    return frozenset(
        each.backend
        for measured in ([] if here.measured is None else here.measured.kernels)
        if (measured.shape.operation, measured.shape.dtype) == (op, dtype)
        for each in measured.candidates
        if each.problem
    )
