"""A step that hangs, with a child of its own. It imports little: its deadline is short."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from gpu.runner import Sizes


def hangs(_sizes: Sizes) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(os.environ["TOLD"]).write_text(f"{child.pid}")
    child.wait()
