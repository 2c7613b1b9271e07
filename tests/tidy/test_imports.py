"""Who may import what, file by file; contracts over chains of imports are in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import ROOT, Source, python_files

CONNECTOR = "connector/kvferry_connector/"
SIDECAR = "sidecar/kvferry_sidecar/"
# The files of the connector that meet vLLM and torch; everything else runs without them.
MEETS_VLLM = frozenset(
    f"{CONNECTOR}{name}.py"
    for name in (
        "entry",
        "scheduler_half",
        "worker_half",
        "describe",
        "export",
        "events",
        "meta",  # the metadata classes are subclasses of vLLM's
        "stats",
        "vllm_compat",
    )
)
# folder: the roots it may import beside the standard library and itself
ALLOWED: dict[str, tuple[str, ...]] = {
    f"{CONNECTOR}wire/": ("msgspec", "kvferry_connector.wire"),
    CONNECTOR: ("msgspec", "zmq", "kvferry_connector"),
    f"{SIDECAR}keys/": (
        "numpy",
        "kvferry_native",
        "kvferry_sidecar.keys",
        "kvferry_sidecar.sessions.model",
    ),
    f"{SIDECAR}geometry/": (
        "numpy",
        "kvferry_native",
        "kvferry_sidecar.geometry",
        "kvferry_sidecar.keys",
        "kvferry_sidecar.limits",
        "kvferry_sidecar.masks.kinds",
        "kvferry_sidecar.sessions.model",
        # what is validated: the registration as it came, and the refusal that names its fields
        "kvferry_connector.wire",
    ),
    f"{SIDECAR}masks/": (
        "numpy",
        "kvferry_native",
        "kvferry_sidecar.masks",
        "kvferry_sidecar.sessions.model",
    ),
}


def type_checking_lines(tree: ast.Module) -> set[int]:
    """Return the lines of ``if TYPE_CHECKING:`` bodies, which never run."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
        if node.test.id == "TYPE_CHECKING"
        for inner in node.body
        for line in range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
    }


def imports(source: Source) -> list[tuple[int, str]]:
    """Return (line, module) of every import that can run, inside functions too."""
    found = []
    tree = source.tree()
    unreal = type_checking_lines(tree)
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) in unreal:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{source.path}:{node.lineno} is a relative import"
            found.append((node.lineno, node.module or ""))
    return found


def within(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


def rule_for(path: str) -> tuple[str, ...] | None:
    folders = [folder for folder in ALLOWED if path.startswith(folder)]
    return ALLOWED[max(folders, key=len)] if folders else None


def violations(source: Source) -> list[str]:
    roots = rule_for(source.path)
    if roots is None:
        return []
    if source.path in MEETS_VLLM:
        roots = (*roots, "vllm", "torch")
    return [
        f"{source.path}:{line} imports {module}"
        for line, module in imports(source)
        if module.split(".")[0] not in sys.stdlib_module_names and not within(module, roots)
    ]


def test_imports_are_allowed() -> None:
    found = [place for source in python_files() for place in violations(source)]
    assert not found, found


def test_the_sidecar_takes_only_the_wire() -> None:
    found = [
        f"{source.path}:{line} imports {module}"
        for source in python_files(SIDECAR)
        for line, module in imports(source)
        if within(module, ("kvferry_connector",))
        and not within(module, ("kvferry_connector.wire",))
    ]
    assert not found, found


def test_cuda_is_its_driver_alone() -> None:
    found = [
        f"{source.path}:{line}"
        for source in python_files("connector", "sidecar", "demo")
        for line, module in imports(source)
        if within(module, ("cupy", "cupy_backends", "cuda", "pycuda"))
    ]
    assert not found, found


def test_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_connector_loads_light() -> None:
    """Importing the connector brings no cupy, nothing of the sidecar, and not vLLM either."""
    code = (
        "import sys, kvferry_connector\n"
        "heavy = ('cupy', 'kvferry_sidecar', 'kvferry_native', 'vllm', 'torch', 'posix_ipc')\n"
        "sys.exit(','.join(name for name in heavy if name in sys.modules) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"loaded: {done.stderr}"


@pytest.mark.parametrize(
    ("path", "code", "complaints"),
    [
        (f"{CONNECTOR}client.py", "import vllm", 1),
        (f"{CONNECTOR}entry.py", "from vllm.config import VllmConfig", 0),
        (f"{CONNECTOR}jobs.py", "if TYPE_CHECKING:\n    import vllm", 0),
        (f"{CONNECTOR}wire/hot.py", "import numpy", 1),
        (f"{SIDECAR}masks/full.py", "from kvferry_sidecar.loop import Loop", 1),
        (f"{SIDECAR}masks/full.py", "import numpy as np", 0),
        (f"{SIDECAR}loop.py", "import zmq", 0),
    ],
)
def test_the_rule_can_fail(path: str, code: str, complaints: int) -> None:
    assert len(violations(Source(path, code))) == complaints
