"""Comparison of `plan`'s counts with a simulated step of the same case, component by component."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from diffmegatron.config.load import load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting.memory import StageMemory, memory_by_stage
from diffmegatron.plan.traffic import Traffic, stage_traffic
from tests.simulated_cuda.recording import Case, Recording

MIB = 1 << 20
# Largest allowed relative difference of a memory component (MEMORY) and of the bytes sent (SENT).
MEMORY, SENT = 0.01, 0.001

# Components that are held between steps: name in recordings -> attribute of `StageMemory`.
HELD = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "communication",
}
# Collectives with a payload below this number of bytes are not compared: `plan` does not count the
# sums of single numbers over ranks (a norm, a decision, the loss).
_AGREEMENT = 1 << 16


@dataclass(frozen=True)
class Compared:
    """One component of a case, in bytes.

    Attributes:
        name: "memory: ..." for bytes on the rank, "sent: ..." for bytes that it sends in a step.
        executed: bytes that the simulated step allocated or sent.
        planned: bytes that `plan` counts.
    """

    name: str
    executed: int
    planned: int

    @property
    def error(self) -> float:
        """Relative error of ``planned``; 1.0 if only ``executed`` is 0, and 0.0 if both are 0."""
        if not self.executed:
            return 1.0 if self.planned else 0.0
        return self.planned / self.executed - 1

    def is_within(self, tolerance: float | None = None) -> bool:
        """Return whether plan and execution differ by at most a relative tolerance or 1 MiB.

        Args:
            tolerance: relative tolerance; None: :data:`MEMORY` or :data:`SENT`, by ``self.name``.
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
    """Compare all components of a case; leave out those with 0 bytes in both step and plan."""
    recipe = recipe_of(case)
    stage = case.rank * recipe.parallel.pipeline // case.world_size
    memory = memory_by_stage(recipe, case.world_size)[stage]
    rows = [
        *_memory(recording, memory),
        *_sent(recording, stage_traffic(recipe, case.world_size, stage)),
    ]
    return [each for each in rows if each.executed or each.planned]


def recipe_of(case: Case) -> Recipe:
    """Return the recipe of a case, with the batch size for the case's number of microbatches."""
    recipe = load_stages(case.recipe, case.overrides)[case.stage]
    if case.microbatches is None:
        return recipe
    data = case.world_size // recipe.parallel.model_ranks
    batch = case.microbatches * data * recipe.training.micro_batch_size
    training = recipe.training.model_copy(update={"global_batch_size": batch})
    return recipe.model_copy(update={"training": training})


def _memory(recording: Recording, stage: StageMemory) -> Iterator[Compared]:
    """Compare the components at the peak of forward and backward, the update, and the peak."""
    passes, update = (recording.peaks[phase] for phase in ("forward_backward", "update"))
    now, then = passes.components, update.components
    # The first forward pass makes the rotary angles outside of layers, so the recorder counts them
    # as "loss"; `plan` counts them as activations.
    activations = now["activations"] + recording.held.components["loss"]
    beside = passes.total - sum(now[name] for name in HELD) - activations
    most = stage.passes
    for name in HELD:
        gathered = stage.passes.gathered if name == "buffers" else 0
        made = most.gradients if name == "gradients" else 0
        yield Compared(f"memory: {name}", now[name], getattr(stage, HELD[name]) + gathered + made)
    yield Compared("memory: activations", activations, stage.activations - most.freed)
    yield Compared("memory: loss or backward", beside, most.beside)
    # With a single microbatch, ZeRO 2 may make the gradients after the peak of both passes.
    made = then["update"] + then["gradients"] - now["gradients"]
    yield Compared("memory: update", made, stage.update - most.gradients)
    yield Compared("memory: peak", max(passes.total, update.total), stage.total)


def _sent(recording: Recording, traffic: Traffic) -> Iterator[Compared]:
    sent = dict.fromkeys((each.name for each in fields(Traffic)), 0.0)
    for each in recording.collectives:
        if each.phase not in ("forward_backward", "update") or each.bytes < _AGREEMENT:
            continue
        names = {"embedding": "pipeline", "model": "tensor", "stage": "muon"}
        group = names.get(each.group, each.group)
        if group in ("data", "world"):
            group = "weights" if each.operation in ("all_gather", "broadcast") else "gradients"
        sent[group] += each.sent
    for name, executed in sent.items():
        yield Compared(f"sent: {name}", round(executed), getattr(traffic, name))
