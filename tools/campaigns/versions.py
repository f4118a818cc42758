"""Run the version-dependent tests under other versions of Python and of the libraries.

    python -m tools.campaigns.versions --python python3.12 torch==2.15.0
    python -m tools.campaigns.versions --oldest         # the oldest that pyproject.toml admits
    python -m tools.campaigns.versions --table          # only write the table of versions.md

The command builds an environment in a temporary folder with uv. It installs the versions in
constraints.txt, in which the requirements on the command line replace the versions of the same
packages; or, with --oldest, the oldest versions that pyproject.toml admits. It runs the tests of
``make test-versions`` there, and records the installed versions and the number of passed tests in
docs/results/versions.json and docs/results/versions.md. It takes minutes, and gigabytes of disk if
the package index has only builds of torch with CUDA.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.paths import RESULTS, ROOT

ROWS = RESULTS / "versions.json"
PAGE = ROOT / "docs" / "results" / "versions.md"
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"
LIBRARIES = ("torch", "triton", "megatron-core", "deepspeed", "transformers", "numpy", "pydantic")
# Pattern of the packages whose versions each release of torch prescribes.
OF_TORCH = re.compile(r"triton|nvidia-|cuda-")


def package(requirement: str) -> str:
    """Return the name in a requirement such as ``torch==2.7.1``."""
    return re.split(r"[=<>!~ ;\[]", requirement, maxsplit=1)[0].lower()


def constraints(pins: list[str]) -> str:
    """Return the text of constraints.txt with other versions of some packages.

    The lines on the packages of ``pins`` are replaced by ``pins``. For torch and transformers, the
    lines on packages whose version depends on them are removed.

    Args:
        pins: requirements such as ``torch==2.7.1``.
    """
    named = {package(pin) for pin in pins}
    kept = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if package(line) not in named
        and not ("torch" in named and OF_TORCH.match(line))
        # Each version of transformers requires certain versions of these packages.
        and not ("transformers" in named and package(line) in ("huggingface-hub", "tokenizers"))
    ]
    return "\n".join([*kept, *pins]) + "\n"


def lower_bounds(python: str) -> str:
    """Return constraints with the oldest admitted release of every package in pyproject.toml.

    Raises:
        FileNotFoundError: uv is not installed.
    """
    command = ["uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--python", python]
    options = ["--resolution", "lowest-direct", "--no-annotate", "--no-header", "--quiet"]
    return subprocess.check_output([*command, *options], cwd=ROOT, text=True)


def counts(output: str) -> dict[str, int]:
    """Return the numbers of passed, failed, erroneous and skipped tests from pytest's last line."""
    return {
        word: int(found.group(1)) if (found := re.search(rf"(\d+) {word}", output)) else 0
        for word in ("passed", "failed", "error", "skipped")
    }


def try_versions(python: str, constraints: str, folder: Path) -> dict[str, Any]:
    """Install packages in a new environment, run the tests, and return the row of the results.

    Args:
        python: Python interpreter of the environment.
        constraints: text of a constraints file, which sets the versions.
        folder: empty folder for the environment.

    Raises:
        SystemExit: no test passed.
        subprocess.CalledProcessError: uv cannot install these versions together.
        FileNotFoundError: uv is not installed.
    """
    own_constraints = folder / "constraints.txt"
    own_constraints.write_text(constraints)
    environment = folder / "environment"
    installed_python = environment / "bin" / "python"
    subprocess.run(["uv", "venv", "--quiet", "--python", python, environment], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", installed_python]
    packages = ["--constraint", own_constraints, "--editable", f"{ROOT}[dev]"]
    subprocess.run([*install, *packages], check=True)
    # The Makefile takes this file as the mark of a complete environment. Without it, make would
    # install the packages again.
    (environment / ".installed").touch()
    tests = subprocess.run(
        ["make", "test-versions", f"VENV={environment}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(tests.stdout[-5_000:], tests.stderr[-2_000:], sep="\n")
    found = counts(tests.stdout.strip().rpartition("\n")[2])
    if not found["passed"]:
        raise SystemExit("error: no test ran; pytest's output is above, and no row was written")
    script = (
        "import importlib.metadata as m, json, platform, sys; "
        "print(json.dumps({'python': platform.python_version()} "
        "| {name: m.version(name) for name in sys.argv[1:]}))"
    )
    versions = subprocess.check_output([installed_python, "-c", script, *LIBRARIES], text=True)
    return {
        "versions": json.loads(versions),
        **found,
        "machine": platform.machine(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as docs/results/versions.md shows them."""
    lines = [
        f"| Python | {' | '.join(LIBRARIES)} | passed | failed | command |",
        "|" + "---|" * (len(LIBRARIES) + 4),
    ]
    for row in rows:
        versions = row["versions"]
        cells = [versions[name].partition("+")[0] for name in ("python", *LIBRARIES)]
        failed = row["failed"] + row["error"]
        lines.append(f"| {' | '.join(cells)} | {row['passed']} | {failed} | `{row['command']}` |")
    return "\n".join(lines)


def write_table(rows: list[dict[str, Any]]) -> None:
    """Replace the table of docs/results/versions.md by one with these rows."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


def main() -> None:
    """Try one set of versions, and write its row to versions.json and to docs/results/versions.md.

    The row replaces an earlier row with the same versions. With ``--table``, only the table of
    docs/results/versions.md is written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.campaigns.versions", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("pins", nargs="*", help="requirements such as torch==2.7.1")
    parser.add_argument("--python", default=sys.executable, help="interpreter to try them with")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    parser.add_argument("--oldest", action="store_true", help="try the oldest packages")
    given = parser.parse_args()
    if given.oldest and given.pins:
        parser.error("--oldest takes no requirements")
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else []
    if not given.table:
        with tempfile.TemporaryDirectory() as folder:
            tried = lower_bounds(given.python) if given.oldest else constraints(given.pins)
            row = try_versions(given.python, tried, Path(folder))
        arguments = ["--oldest"] if given.oldest else given.pins
        command = ["python", "-m", "tools.campaigns.versions", "--python", Path(given.python).name]
        row["command"] = shlex.join([*command, *arguments])
        same = [each["versions"] == row["versions"] for each in rows]
        rows = [each for each, is_same in zip(rows, same, strict=True) if not is_same] + [row]
        rows.sort(key=lambda each: [int(n) for n in re.findall(r"\d+", str(each["versions"]))])
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    write_table(rows)


if __name__ == "__main__":
    main()
