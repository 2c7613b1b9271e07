"""Write the golden renders: .venv/bin/python tests/helm/write_golden.py; then read the diff."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.chart import GOLDEN, RECIPES, golden_text

for name in RECIPES:
    (GOLDEN / f"{name}.txt").write_text(golden_text(name))
