"""Cases to simulate and their recordings: plain data, without torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Components of memory. The first four are held between steps; comparison.py maps them to the names
# that `plan` uses.
#   weights      parameters of the network
#   gradients    tensors in which the engine accumulates gradients between microbatches
#   optimizer    float32 master weights and Adam's moments
#   buffers      everything else that is made before the first step, such as buckets; and weights
#                that ZeRO 3 gathers
#   activations  made in a forward pass, by a layer, an embedding or a communication between stages
#   loss         made in a forward pass, by the output layer or by the stage outside of its
#                submodules
#   backward     made in a backward pass, by its operations or by a layer that is recomputed
#   update       made by the optimizer's step, the sum of gradients over ranks included
COMPONENTS = (
    "weights", "gradients", "optimizer", "buffers", "activations", "loss", "backward", "update"
)  # fmt: skip
# Bytes that one of k ranks sends per byte of payload, in a collective with ring algorithms.
_SENT = {
    "all_reduce": lambda k: 2 * (k - 1) / k,
    "all_gather": lambda k: (k - 1) / k,
    "reduce_scatter": lambda k: (k - 1) / k,
    "all_to_all": lambda k: (k - 1) / k,
    "broadcast": lambda k: (k - 1) / k,
    "reduce": lambda k: (k - 1) / k,
    "send": lambda _: 1.0,
}


@dataclass(frozen=True)
class Case:
    """One rank of one recipe.

    Attributes:
        recipe: path of a recipe, from the root of the checkout.
        world_size: number of simulated GPUs.
        overrides: overrides of the recipe, each ``section.key=value``.
        rank: global rank to simulate.
        steps: number of training steps; memory and collectives are recorded for the last one.
        microbatches: number of microbatches per step; None: as many as the recipe has.
        run: function that runs the case, as ``module:function``; its arguments are the recipe, the
            case and the recorder.
        prepare: function without arguments that is called before ``run``, as ``module:function``;
            tests patch mistakes into the code with it.
        stage: number of the recipe's training stage, from 0.
    """

    recipe: str
    world_size: int
    overrides: tuple[str, ...] = ()
    rank: int = 0
    steps: int = 2
    microbatches: int | None = 1
    run: str = "tests.simulated_cuda.step:run_steps"
    prepare: str | None = None
    stage: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes alive at one moment, each allocation rounded up to 512 bytes as CUDA's allocator does.

    Kernels' workspaces, fragmentation and the CUDA context are not counted.

    Attributes:
        total: bytes on the device.
        components: the bytes on the device, by :data:`COMPONENTS`.
        allocations: the largest groups of equal allocations, each as
            ``(component, module, operation, shape, dtype, bytes)``.
    """

    total: int
    components: Mapping[str, int]
    allocations: tuple[tuple[str, str, str, str, str, int], ...] = ()


@dataclass(frozen=True)
class Collective:
    """Calls of one kind in one phase of the last step.

    Attributes:
        phase: see :attr:`Recording.peaks`.
        operation: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send,
            recv, barrier, gather or scatter.
        group: "data", "tensor", "context", "pipeline", "embedding", "stage" (all ranks of a
            pipeline stage), "model" (all ranks that hold a part of one model), "world", or torch's
            name for any other group.
        group_size: number of ranks in the group.
        dtype: dtype of the tensors, or several joined by "/".
        is_blocking: whether the compute stream waits for the collective at once.
        count: number of calls.
        bytes: payload of all calls. The payload of an all-gather is its output. The payload of a
            reduce-scatter is its input.
    """

    phase: str
    operation: str
    group: str
    group_size: int
    dtype: str
    is_blocking: bool
    count: int
    bytes: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, by ring algorithms; what it receives is not counted."""
        return _SENT.get(self.operation, lambda _: 0.0)(self.group_size) * self.bytes


@dataclass(frozen=True)
class Launch:
    """Kernels of one name that one module launched in one phase of the last step.

    Attributes:
        phase: see :attr:`Recording.peaks`.
        module: path of the module within the network; "" outside of modules and in the backward
            pass, whose kernels are not attributed to modules.
        kernel: name of a Triton kernel, of a function that ``torch.compile`` fuses, or of one of
            torch's operations, which is counted as one kernel.
        count: number of launches.
        bytes: bytes of all tensors that the launches read and write.
    """

    phase: str
    module: str
    kernel: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Recording:
    """Record of one case; all numbers are of its last step unless noted otherwise.

    Attributes:
        held: memory after the last step.
        peaks: memory at the peak of each phase. The case's function opens the phases. By default,
            these are "build" and "engine" before the first step, and "forward_backward" and
            "update" in each step.
        host: peak of the bytes alive in the host's memory in the whole case. A pinned allocation is
            rounded up to a power of two, as torch's allocator does. Tensors that are created on the
            host with at most 2**20 elements are not counted.
        pinned: the pinned part of ``host``, at its own peak.
        collectives: all collectives of the rank.
        launches: all kernel launches of the rank.
        waits: number of times that the host waited for the device in all steps. Keys are
            ``module.function kind``: the place and the kind of wait.
        outcome: return value of the case's function.
    """

    held: Memory
    peaks: Mapping[str, Memory]
    host: int
    pinned: int
    collectives: tuple[Collective, ...]
    launches: tuple[Launch, ...]
    waits: Mapping[str, int]
    outcome: Any = None

    def sent(self, group: str) -> float:
        """Return the bytes of a step that this rank sends to the other ranks of a group."""
        return sum(each.sent for each in self.collectives if each.group == group)

    def count(self, **values: object) -> int:
        """Return the number of collectives whose attributes have these values."""
        return sum(
            each.count
            for each in self.collectives
            if all(getattr(each, name) == value for name, value in values.items())
        )

    @property
    def peak(self) -> Memory:
        """Memory at the peak of a step."""
        steps = (memory for phase, memory in self.peaks.items() if phase not in BEFORE_STEPS)
        return max(steps, key=lambda memory: memory.total)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Recording":
        """Invert :meth:`to_plain`."""
        return cls(
            held=_memory(plain["held"]),
            peaks={phase: _memory(each) for phase, each in plain["peaks"].items()},
            host=plain["host"],
            pinned=plain["pinned"],
            collectives=tuple(Collective(**each) for each in plain["collectives"]),
            launches=tuple(Launch(**each) for each in plain["launches"]),
            waits=plain["waits"],
            outcome=plain["outcome"],
        )


BEFORE_STEPS = ("build", "engine")


def _memory(plain: Mapping[str, Any]) -> Memory:
    allocations = tuple(tuple(each) for each in plain["allocations"])
    return Memory(plain["total"], plain["components"], allocations)
