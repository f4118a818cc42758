"""Who may import whom, read from the imports; docs/architecture.md says the same in words."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "diffmegatron"

# From the top down: a room imports itself and rooms on lower floors, never sideways.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"plan", "doctor"},
    {"evaluation"},
    {"training", "hf", "dex"},
    {"checkpoint", "optim", "data"},
    {"model"},
    {"attention", "parallel"},
    {"config"},
    {"errors", "__init__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

MEGATRON = {
    "model",
    "attention/context",
    "attention/core.py",
    "attention/norm.py",
    "attention/specs.py",
    "parallel",
    "checkpoint",
    "data/store.py",
    "training/step.py",
}


def modules() -> list[Path]:
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every absolute module name a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = ["diffmegatron", *path.parts[: len(path.parts) - node.level]]
                base = ".".join([*parent, *filter(None, [node.module])])
            names.add(base)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def within(path: Path, places: set[str]) -> bool:
    return any(path == Path(place) or Path(place) in path.parents for place in places)


def test_every_room_has_a_floor():
    assert {room(path) for path in modules()} <= set(FLOOR)


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_go_down(path):
    here = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "diffmegatron" or len(parts) == 1 or parts[1] not in FLOOR:
            continue
        assert parts[1] == here or FLOOR[parts[1]] > FLOOR[here], f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_engines_are_imported_in_their_rooms_only(path):
    roots = {name.split(".")[0] for name in imports(path)}
    if "megatron" in roots:
        assert within(path, MEGATRON), f"{path} imports megatron.core"
    if "deepspeed" in roots:
        assert within(path, {"optim"}), f"{path} imports deepspeed"
    if within(path, {"attention/kernels"}):
        own = [name for name in imports(path) if name.startswith("diffmegatron")]
        outside = [name for name in own if not name.startswith("diffmegatron.attention.kernels")]
        assert not outside, f"{path} imports {outside}"


def test_no_file_is_past_400_lines():
    long = {
        str(p): n for p in modules() if (n := len((PACKAGE / p).read_text().splitlines())) > 400
    }
    assert not long
