"""A real ``kvferry serve`` for a bench: private run directory and pool, both gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvferry_demo.processes import Sidecar, new_pool_name


@contextmanager
def running_sidecar(pool_bytes: int, flags: Sequence[str] = ()) -> Iterator[Sidecar]:
    """Yield a sidecar that serves. Raises ChildError, with its log, when it does not start."""
    folder = Path(tempfile.mkdtemp(prefix="kvf-"))
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o700)
    try:
        with Sidecar(
            run_dir,
            folder / "sidecar.log",
            pool_name=new_pool_name("bench"),
            pool_bytes=pool_bytes,
            flags=flags,
        ) as sidecar:
            sidecar.wait_ready()
            yield sidecar
    finally:
        shutil.rmtree(folder)
