"""The rules of docs/architecture.md about imports and folders, checked in every module."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "diffmegatron"

PAGE = (ROOT / "docs/architecture.md").read_text()


def expand(name: str) -> list[str]:
    """Return the paths that ``a/{b,c}`` stands for; a name without braces stands for itself."""
    start, brace, rest = name.partition("{")
    return [start + each for each in rest.rstrip("}").split(",")] if brace else [name]


def read_layers() -> list[set[str]]:
    """Return the packages of each layer from the page, from the top down, as dotted names.

    A package may import itself and packages of lower layers, but no other package of its own layer.
    """
    rules = PAGE.partition("\n## Who may import whom\n")[2].partition("\n## ")[0]
    order = " ".join(line for line in rules.splitlines() if line.startswith("    "))
    layers = [re.split(r", *(?![^{]*})", layer.strip()) for layer in order.split("->")]
    return [{path.replace("/", ".") for name in names for path in expand(name)} for names in layers]


def read_importers_of_megatron() -> set[str]:
    """Return the packages and modules that may import ``megatron.core`` according to the page."""
    names = re.search(r"^Only ([^.]*(?:\.py[^.]*)*) import `megatron\.core`", PAGE, re.MULTILINE)
    assert names, "docs/architecture.md has no sentence on the importers of megatron.core"
    return {path for name in re.findall(r"`([^`]+)`", names[1]) for path in expand(name)}


LAYERS = read_layers()
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
MEGATRON = read_importers_of_megatron()


def modules() -> list[Path]:
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Return the absolute names that a file imports, at any place in the file."""
    nodes = ast.walk(ast.parse((PACKAGE / path).read_text()))
    return {name for node in nodes for name in imported_by(node, path)}


def imported_by(node: ast.AST, path: Path) -> set[str]:
    """Return the absolute names that a node imports; an empty set if the node is not an import."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    base = node.module or ""
    if node.level:
        parent = ["diffmegatron", *path.parts[: len(path.parts) - node.level]]
        base = ".".join([*parent, *filter(None, [node.module])])
    return {base, *(f"{base}.{alias.name}" for alias in node.names)}


def package_of(parts: tuple[str, ...]) -> str:
    """Return the innermost package in ``LAYERS`` of the module whose name has these parts."""
    inner = ".".join(parts[:2])
    return inner if inner in LAYER_OF else parts[0]


def parts_of(path: Path) -> tuple[str, ...]:
    return path.with_suffix("").parts


def within(path: Path, places: set[str]) -> bool:
    """Return whether a module is one of the places or in one of them; ``.py`` may be missing."""
    return any(Path(place) in (path, path.with_suffix(""), *path.parents) for place in places)


def test_every_package_has_a_layer():
    assert {package_of(parts_of(path)) for path in modules()} <= set(LAYER_OF)


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_go_down(path):
    here = package_of(parts_of(path))
    for name in imports(path):
        package, *parts = name.split(".")
        if package != "diffmegatron" or not parts or parts[0] not in LAYER_OF:
            continue
        there = package_of(tuple(parts))
        assert there == here or LAYER_OF[there] > LAYER_OF[here], f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_engines_are_imported_in_their_packages_only(path):
    roots = {name.split(".")[0] for name in imports(path)}
    if "megatron" in roots:
        assert within(path, MEGATRON), f"{path} imports megatron.core"
    if "deepspeed" in roots:
        assert within(path, {"optim"}), f"{path} imports deepspeed"
    if within(path, {"attention/kernels"}):
        own = [name for name in imports(path) if name.startswith("diffmegatron")]
        outside = [name for name in own if not name.startswith("diffmegatron.attention.kernels")]
        assert not outside, f"{path} imports {outside}"


# The files in hf/modeling are copied into exports and cannot import this package.
KIND_PACKAGES = {
    *("attention/kinds", "attention/costs", "attention/kernels"),
    *("hf/kinds", "hf/modeling", "evaluation/head_maps.py"),
}


def test_attention_kinds_are_not_named_outside_their_packages():
    """Check that other packages use the properties of a kind, and do not compare its name."""
    names = re.compile(
        r"""["'](softmax|diff_v1|diff_v2|grouped|diffllama)["']|is_differential"""
        r"""|\b(DiffV1|DiffV2|Grouped|Softmax|Dex)\b"""
    )
    # Names of the kernels' operations are allowed, because several kinds share an operation.
    operations = re.compile(r"""operation [!=]= ["']\w+["']""")
    found = {
        f"{path}:{number}: {line.strip()}"
        for path in modules()
        if not within(path, KIND_PACKAGES)
        for number, line in enumerate((PACKAGE / path).read_text().splitlines(), start=1)
        if names.search(operations.sub("", line))
    }
    assert not found


def test_unit_tests_mirror_the_package():
    """Check that every folder in tests/unit is also a folder of the package.

    Also check that every folder of tests has an ``__init__.py``, which allows test files in
    different folders to have the same name.
    """
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("*.py")}
    assert not {str(folder) for folder in folders if not (PACKAGE / folder).is_dir()}
    tests = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not {str(folder) for folder in tests if not (folder / "__init__.py").is_file()}


def test_recipes_are_read_without_torch():
    code = "import diffmegatron.config.load, sys; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


def test_no_modules_import_each_other():
    """Check that the imports between modules have no cycle.

    Imports for types only are included. Imports inside functions are not included.
    """
    names = {".".join(name_of(path)) for path in modules()}
    imported = {
        ".".join(name_of(path)): {name for name in imports_at_once(path) if name in names}
        for path in modules()
    }
    for name, others in imported.items():
        # "from package import module" counts as an import of the module only, because Python has
        # imported the package before.
        others -= {other for other in others if any(o.startswith(f"{other}.") for o in others)}
        others.discard(name)
    graphlib.TopologicalSorter(imported).prepare()


def name_of(path: Path) -> list[str]:
    return ["diffmegatron", *(part for part in parts_of(path) if part != "__init__")]


def imports_at_once(path: Path) -> set[str]:
    """Return the names that a file imports outside its functions, including imports for types."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse((PACKAGE / path).read_text())]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names |= imported_by(node, path)
            nodes += ast.iter_child_nodes(node)
    return names


# Names that several modules define on purpose -> reason.
SHARED_NAMES = {
    "Heads": "the heads of a kind, the selected heads of DEX, and the heads of a kernel's tile",
    "cross_entropy": "the loss of a network, and the kernel that computes it",
    "log": "the logger of a module",
    "Kind": "a type variable",
    "T": "a type variable",
}


def defined_by(path: Path) -> set[str]:
    """Return the public names that a module defines outside functions and classes."""
    names = set()
    for node in ast.parse((PACKAGE / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_a_public_name_has_one_home():
    """Check that no two modules define the same public name.

    Commands and ``api.py`` have the names of the functions that they call. The backends in
    ``attention/kernels`` implement the same functions. Files in ``hf/modeling`` cannot import this
    package.
    """
    homes: dict[str, list[str]] = {}
    for path in modules():
        if within(path, {"cli", "api", "commands", "hf/modeling"}):
            continue
        home = "attention/kernels" if within(path, {"attention/kernels"}) else str(path)
        for name in defined_by(path) - SHARED_NAMES.keys():
            homes.setdefault(name, []).append(home)
    assert not {name: sorted(where) for name, where in homes.items() if len({*where}) > 1}
