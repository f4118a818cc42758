"""Comparison of `plan`'s counts with a simulated step of the same case, component by component."""

from collections.abc import Iterator
from dataclasses import dataclass

from diffmegatron.config.load import load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting import StageMemory, memory_by_stage
from diffmegatron.plan.traffic import Traffic, stage_traffic
from tests.simulated_cuda.recording import Case, Recording

MIB = 1 << 20
# Relative differences that are allowed of each component of memory, and of what is sent.
MEMORY, SENT = 0.01, 0.001

# Components that are held between steps, with the names that `plan` has for them.
HELD = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "communication",
}
# Sums over ranks that only agree on a number: a norm, a decision, the loss.
_AGREEMENT = 1 << 16


@dataclass(frozen=True)
class Compared:
    """One component of a case, in bytes.

    Attributes:
        name: "memory: ..." of a rank, or "sent: ..." in a step.
        executed: what the simulated step allocated or sent.
        planned: what `plan` counts.
    """

    name: str
    executed: int
    planned: int

    @property
    def error(self) -> float:
        """Planned over executed bytes, less 1; 1.0 if bytes are planned and none executed."""
        if not self.executed:
            return 1.0 if self.planned else 0.0
        return self.planned / self.executed - 1

    def is_within(self, tolerance: float | None = None) -> bool:
        """Return whether plan and execution agree, within a relative tolerance or a MiB.

        Args:
            tolerance: None for :data:`MEMORY` or :data:`SENT`.
        """
        if tolerance is None:
            tolerance = MEMORY if self.name.startswith("memory") else SENT
        return abs(self.planned - self.executed) <= max(tolerance * self.executed, MIB)

    def __str__(self) -> str:
        return (
            f"{self.name} executed {self.executed / MIB:.1f} MiB, planned "
            f"{self.planned / MIB:.1f} ({self.error:+.2%})"
        )


def compare(case: Case, recording: Recording) -> list[Compared]:
    """Return every component of a case that its step or `plan` has."""
    recipe = recipe_of(case)
    stage = case.rank * recipe.parallel.pipeline // case.world_size
    memory = memory_by_stage(recipe, case.world_size)[stage]
    rows = [
        *_memory(recording, memory),
        *_sent(recording, stage_traffic(recipe, case.world_size, stage)),
    ]
    return [each for each in rows if each.executed or each.planned]


def recipe_of(case: Case) -> Recipe:
    """Return the recipe of a case, with a batch of as many microbatches as the case has."""
    recipe = load_stages(case.recipe, case.overrides)[case.stage]
    if case.microbatches is None:
        return recipe
    data = case.world_size // recipe.parallel.model_ranks
    batch = case.microbatches * data * recipe.training.micro_batch_size
    training = recipe.training.model_copy(update={"global_batch_size": batch})
    return recipe.model_copy(update={"training": training})


def _memory(recording: Recording, stage: StageMemory) -> Iterator[Compared]:
    """Compare the held memory, the components at the peak of the passes, and the update."""
    passes, update = (recording.peaks[phase] for phase in ("forward_backward", "update"))
    now, then = passes.components, update.components
    # The first forward pass makes the rotary angles outside of layers; `plan` has them among the
    # activations.
    activations = now["activations"] + recording.held.components["loss"]
    beside = passes.total - sum(now[name] for name in HELD) - activations
    for name in HELD:
        gathered = stage.passes.gathered if name == "buffers" else 0
        yield Compared(f"memory: {name}", now[name], getattr(stage, HELD[name]) + gathered)
    most = stage.passes
    yield Compared("memory: activations", activations, stage.activations - most.freed)
    yield Compared("memory: loss or backward", beside, most.beside)
    # ZeRO 2 makes the gradients of a single microbatch after the peak of the passes.
    made = then["update"] + then["gradients"] - now["gradients"]
    yield Compared("memory: update", made, stage.update)
    yield Compared("memory: peak", max(passes.total, update.total), stage.total)


def _sent(recording: Recording, traffic: Traffic) -> Iterator[Compared]:
    sent = dict.fromkeys(("tensor", "context", "pipeline", "gradients", "weights"), 0.0)
    for each in recording.collectives:
        if each.phase not in ("forward_backward", "update") or each.bytes < _AGREEMENT:
            continue
        group = {"embedding": "pipeline", "model": "tensor"}.get(each.group, each.group)
        if group in ("data", "world"):
            group = "weights" if each.operation in ("all_gather", "broadcast") else "gradients"
        sent[group] += each.sent
    for name, executed in sent.items():
        yield Compared(f"sent: {name}", round(executed), getattr(traffic, name))
