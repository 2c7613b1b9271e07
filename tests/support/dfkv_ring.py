"""The stand-in for libdfkv, compiled once per test run, with a store of the test's own."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "dfkv" / "standin.c"


class DfkvRing:
    """A library and its store; the names in standin.c make it misbehave."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self.library = shutil.copy(_compiled(), folder / "libdfkv.so")
        self.url = "dfkv://one=127.0.0.1:12001"

    def say(self, name: str) -> None:
        """Begin to misbehave."""
        (self.store / name).touch()

    def unsay(self, name: str) -> None:
        """Stop it."""
        (self.store / name).unlink()


@functools.cache
def _compiled() -> Path:
    folder = tempfile.mkdtemp(prefix="kvf-dfkv-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = Path(folder) / "libdfkv.so"
    flags = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run(["cc", *flags, "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return target
