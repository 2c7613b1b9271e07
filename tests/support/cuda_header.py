"""What NVIDIA's cuda.h says: prototypes as exported, sizes of types, values of constants.

The header comes with triton, which vLLM's packages bring along, or with a CUDA toolkit.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

_TOOLKIT = Path("/usr/local/cuda/include/cuda.h")
_COMMENTS = re.compile(r"/\*.*?\*/", re.S)
# `#define cuMemAlloc cuMemAlloc_v2`: the library exports the right one.
_RENAMED = re.compile(r"^#define\s+(cu\w+)\s+(?:__CUDA_API_PTSZ\()?(cu\w+)", re.M)
_LAST_ERROR = re.compile(  # the comment of an error says so
    r"must\s+(?:\*\s+)?be\s+(?:\*\s+)?terminated(?:(?!\*/).)*\*/\s*CUDA_ERROR_(\w+)", re.S
)
_PROTOTYPE = re.compile(r"^\s*CUresult\s+CUDAAPI\s+(cu\w+)\s*\(([^;]*?)\)\s*;", re.M)


def header() -> Path | None:
    """Return where the header is, if it is here."""
    triton = importlib.util.find_spec("triton")
    folders = (triton.submodule_search_locations if triton is not None else None) or []
    paths = [Path(folder, "backends/nvidia/include/cuda.h") for folder in folders]
    return next((path for path in [*paths, _TOOLKIT] if path.is_file()), None)


@functools.cache
def prototypes(path: Path) -> dict[str, list[str]]:
    """Return the types of the parameters of each function, by the name the library exports."""
    text = _COMMENTS.sub("", path.read_text())
    renamed = dict(_RENAMED.findall(text))
    found: dict[str, list[str]] = {}
    for name, parameters in _PROTOTYPE.findall(text):
        # Only the first of a name is renamed: those behind it are of versions before.
        exported = renamed.pop(name, name)
        found.setdefault(exported, [_type_of(one) for one in parameters.split(",")])
    return found


def last_errors(path: Path) -> set[str]:
    """Return the errors after which a process has to end, as it says."""
    return set(_LAST_ERROR.findall(path.read_text()))


def _type_of(parameter: str) -> str:
    """Return a parameter's type without its name: "const char*", "size_t"."""
    words = re.sub(r"\s+", " ", parameter).strip()
    kind, stars = re.sub(r"\w+$", "", words).strip(), ""
    while kind.endswith("*"):
        kind, stars = kind[:-1].strip(), stars + "*"
    return kind.removeprefix("const ") + stars


def values(path: Path, expressions: Iterable[str]) -> dict[str, int]:
    """Return what integer expressions of C are with this header: sizeof, offsetof, constants."""
    wanted = sorted(set(expressions))
    lines = "".join(
        f'    printf("%s{json.dumps(json.dumps(one))[1:-1]}: %lld", '
        f'"{"," if number else "{"}", (long long)({one}));\n'
        for number, one in enumerate(wanted)
    )
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "ask.c"), Path(folder, "ask")
        source.write_text(
            "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n"
            f'int main(void) {{\n{lines}    puts("}}");\n    return 0;\n}}\n'
        )
        cc = os.environ.get("CC", "cc")
        subprocess.run([cc, f"-I{path.parent}", "-o", program, source], check=True)
        done = subprocess.run([program], check=True, capture_output=True, text=True)
    return {name: int(value) for name, value in json.loads(done.stdout).items()}
