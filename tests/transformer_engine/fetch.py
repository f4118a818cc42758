"""Fetch Transformer Engine's Python files: ``python -m tests.transformer_engine.fetch FOLDER``.

pip finds the wheel ``transformer-engine-cu12`` on its index. The wheel has 729 MB with the CUDA
libraries; only its 173 Python files are read, by HTTP ranges (1.8 MB in 30 requests).
"""

import argparse
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import fsspec

VERSION = "2.20.2"


def find_wheel(version: str) -> str:
    """Return the URL of the wheel with Transformer Engine's Python files.

    Raises:
        subprocess.CalledProcessError: pip finds no wheel of that version.
    """
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps"]
    pip += ["--only-binary", ":all:", "--quiet", "--report", "-"]
    wheel = f"transformer-engine-cu12=={version}"
    report = subprocess.run([*pip, wheel], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(report.stdout)["install"][0]["download_info"]["url"]


def fetch(url: str, version: str, folder: Path) -> None:
    """Write Python files (without JAX), licence and a minimal METADATA file into a new folder."""
    unpacked = folder.with_name(f"{folder.name}.{os.getpid()}")
    with fsspec.open(url, block_size=2**16) as remote, zipfile.ZipFile(remote) as wheel:
        for name in wheel.namelist():
            if name.endswith((".py", "LICENSE")) and not name.startswith("transformer_engine/jax/"):
                wheel.extract(name, unpacked)
    # Transformer Engine reads its version from the distribution of this name.
    info = unpacked / f"transformer_engine-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    unpacked.rename(folder)


def main() -> None:
    """Fetch the files into the folder given on the command line, unless the folder exists."""
    parser = argparse.ArgumentParser(prog="python -m tests.transformer_engine.fetch")
    parser.add_argument(
        "folder", type=Path, help="folder to create, as in TRANSFORMER_ENGINE_PYTHON"
    )
    parser.add_argument("--version", default=VERSION)
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        fetch(find_wheel(arguments.version), arguments.version, arguments.folder)


if __name__ == "__main__":
    main()
