"""The environment LMCache runs in: built once under build/, over the one that runs the bench.

LMCache's own packages are installed beside a .pth that adds this interpreter's site-packages: both
engines then run the same vLLM, torch and Python, and no second torch is needed (0.12 GiB in all).
Its remaining requirements are CUDA libraries and clients of services, which nothing here imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

LMCACHE = "0.5.6"
# What LMCache imports and vLLM's CPU build does not bring.
PACKAGES = (
    f"lmcache=={LMCACHE}",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "awscrt==0.38.1",
    "caio==0.12.10",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
)
FOLDER = Path(__file__).parents[2] / "build" / "peer-venv"


def peer_python() -> str:
    """Return the interpreter that has LMCache, after making it. Raises CalledProcessError."""
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / ".installed"
    wanted = "\n".join((sysconfig.get_path("purelib"), *PACKAGES))
    if stamp.exists() and stamp.read_text() == wanted:
        return os.fspath(python)
    venv.create(FOLDER, clear=True, with_pip=False)
    packages = next((FOLDER / "lib").glob("python*")) / "site-packages"
    own = sysconfig.get_path("purelib")
    # addsitedir, not a bare path: the folder has .pth files of its own (kvferry is editable).
    (packages / "bench.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    install = [sys.executable, "-m", "pip", "--python", os.fspath(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", *PACKAGES], check=True)
    stamp.write_text(wanted)
    return os.fspath(python)
