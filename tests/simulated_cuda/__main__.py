"""Print the simulation of one rank: ``python -m tests.simulated_cuda RECIPE --gpus N``."""

import argparse

from tests.simulated_cuda.recording import Memory
from tests.simulated_cuda.simulate import Case, simulate

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulated_cuda",
        description="Run training steps of a recipe as one rank of a simulated cluster, and print "
        "memory, collectives, waits for the device and the most frequent kernels of the last step.",
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1, help="0: as many as the recipe has")
    given = parser.parse_args()
    (found,) = simulate(
        [
            Case(
                given.recipe,
                given.gpus,
                tuple(given.overrides),
                given.rank,
                given.steps,
                given.microbatches or None,
            )
        ]
    )
    for name, memory in (*found.peaks.items(), ("held", found.held)):
        print(f"{name:17} {memory.total / GIB:8.3f} GiB   {_components(memory)}")
    print(f"{'host':17} {found.host / GIB:8.3f} GiB   of it pinned {found.pinned / GIB:.3f}")
    print("\nlargest at the peak of the step:")
    for component, module, operation, shape, dtype, size in found.peak.allocations[:16]:
        print(f"  {size / GIB:8.3f} GiB  {component:11} {operation} {shape} {dtype} {module}")
    print("\ncollectives of the step:")
    for each in found.collectives:
        if each.phase in ("forward_backward", "update"):
            print(
                f"  {each.count:5} x {each.operation} {each.group}[{each.group_size}] {each.dtype}"
                f"{' blocking' if each.is_blocking else ''}, {each.bytes / 1e9:.4f} GB, "
                f"sends {each.sent / 1e9:.4f} GB in {each.phase}"
            )
    print("\nwaits for the device in steps:", dict(found.waits))
    print("outcome:", found.outcome)


def _components(memory: Memory) -> str:
    return ", ".join(f"{k} {v / GIB:.3f}" for k, v in memory.components.items() if v)


if __name__ == "__main__":
    main()
