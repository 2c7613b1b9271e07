"""Every call of the driver against NVIDIA's header: how many arguments, how wide, to what.

A wrong width shows on no machine without a GPU: the fake driver is by the same hands.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import structlog
from kvferry_connector import cuda as connector_cuda
from kvferry_connector.wire.attach import Memory
from kvferry_sidecar.engines import cuda, cuda_choice, cuda_driver, cuda_memory, cuda_modes
from kvferry_sidecar.engines.base import CopyStatus, Direction, PoolSpan
from kvferry_sidecar.engines.cuda import CudaCopyEngine, GpuOptions
from kvferry_sidecar.engines.cuda_driver import ERRORS, LOST, Driver
from support import cuda_header
from support.copying import SHAPES, Pool, extents_of
from support.fake_cuda import SOURCE, FakeGpu, GpuEngineMemory, driver_with_kernels, library
from support.waiting import wait_until

HEADER = cuda_header.header()
pytestmark = pytest.mark.skipif(
    HEADER is None, reason="no cuda.h here: triton has one, and a CUDA toolkit"
)
CALLED = re.compile(r'"(cu[A-Z]\w+)"')
MODULES = (connector_cuda, cuda, cuda_choice, cuda_driver, cuda_memory, cuda_modes)
# Of these the header says how wide they are; of what another pointer points to, nothing is known.
OPAQUE = ("void*", "char*")
PINNED = "CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP"
CONSTANTS = (
    ("CU_POINTER_ATTRIBUTE_BUFFER_ID", connector_cuda._BUFFER_ID),
    ("CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE", connector_cuda._LEGACY_CAPABLE),
    ("CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES", connector_cuda._HANDLE_TYPES),
    ("CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE", connector_cuda._MEMPOOL),
    ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", connector_cuda._POSIX_FD),
    ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", cuda_driver._POSIX_FD),
    ("CU_MEM_HANDLE_TYPE_FABRIC", connector_cuda._FABRIC),
    (PINNED, connector_cuda._PORTABLE_AND_MAPPED),
    (PINNED, cuda_driver._PORTABLE_AND_MAPPED),
    ("CU_STREAM_WRITE_VALUE_DEFAULT", 0),
    ("CU_STREAM_NON_BLOCKING", cuda_driver._NON_BLOCKING),
    ("CU_EVENT_DISABLE_TIMING", cuda_driver._NO_TIMING),
    ("CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS", cuda_driver._LAZY_PEER_ACCESS),
    ("CU_MEMORYTYPE_HOST", cuda_driver.MEMORY_HOST),
    ("CU_MEMORYTYPE_DEVICE", cuda_driver.MEMORY_DEVICE),
    ("CU_MEM_LOCATION_TYPE_DEVICE", cuda_driver._ON_DEVICE),
    ("CU_MEM_ACCESS_FLAGS_PROT_READWRITE", cuda_driver._READ_WRITE),
    ("CU_MEMCPY_SRC_ACCESS_ORDER_STREAM", cuda_modes._STREAM_ORDER),
    ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", cuda_modes._COMPUTE_MAJOR),
    ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", cuda_modes._COMPUTE_MINOR),
    ("CU_GET_PROC_ADDRESS_DEFAULT", 0),
    *((f"CUDA_ERROR_{name}", code) for code, (name, _) in ERRORS.items()),
)
STRUCTURES = {
    "CUipcMemHandle": (cuda_driver.IpcHandle, ("reserved",)),
    "CUDA_MEMCPY2D": (cuda_driver.Copy2D, [name for name, _ in cuda_driver.Copy2D._fields_]),
    "CUmemAccessDesc": (cuda_driver._Access, ("location.type", "location.id", "flags")),
    "CUmemcpyAttributes": (
        cuda_modes._Attributes,
        (
            "srcAccessOrder", "srcLocHint.type", "srcLocHint.id",
            "dstLocHint.type", "dstLocHint.id", "flags",
        ),
    ),
}  # fmt: skip


def prototypes() -> dict[str, list[str]]:
    assert HEADER is not None, "skipped without it"
    return cuda_header.prototypes(HEADER)


def values(expressions: Iterable[str]) -> dict[str, int]:
    assert HEADER is not None, "skipped without it"
    return cuda_header.values(HEADER, expressions)


@functools.cache
def sizes() -> dict[str, int]:
    """Return the bytes of every type that a parameter has, and of what it points to."""
    kinds = {kind for name in names() for kind in prototypes()[name]}
    kinds |= {kind.removesuffix("*") for kind in kinds if kind not in OPAQUE and "*" in kind}
    found = values(f"sizeof({kind})" for kind in kinds)
    return {kind: found[f"sizeof({kind})"] for kind in kinds}


def names() -> set[str]:
    """Return all functions of the driver that the product calls."""
    texts = [Path(module.__file__ or "").read_text() for module in MODULES]
    return {name for text in texts for name in CALLED.findall(text)}


def check(name: str, given: list[tuple[int, int | None]]) -> None:
    """Compare (bytes of the argument, bytes it points to if that is known) with the header."""
    wanted = prototypes()[name]
    assert len(given) == len(wanted), f"{name} takes {wanted}"
    for number, (kind, (width, target)) in enumerate(zip(wanted, given, strict=True)):
        assert width == sizes()[kind], f"{name}, argument {number}: {kind}"
        if target is not None and kind not in OPAQUE:
            assert target == sizes()[kind.removesuffix("*")], f"{name}, argument {number}: {kind}"


def of_type(kind: Any) -> tuple[int, int | None]:
    target = getattr(kind, "_type_", None)
    pointed = ctypes.sizeof(target) if isinstance(target, type) else None
    return ctypes.sizeof(kind), pointed


def of_argument(argument: Any) -> tuple[int, int | None]:
    """As ctypes passes it where nothing was declared: a number as an int, an array as a pointer."""
    if argument is None or isinstance(argument, bytes):
        return 8, None
    if isinstance(argument, int):
        return 4, None
    if isinstance(argument, ctypes.Array):
        return 8, None
    if hasattr(argument, "_obj"):  # of byref
        return 8, ctypes.sizeof(argument._obj)
    return ctypes.sizeof(argument), None


class Watched:
    """A library of which every call is compared with the header."""

    def __init__(self, library_: ctypes.CDLL, seen: set[str]) -> None:
        self._library, self._seen = library_, seen

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = getattr(self._library, name)

        def checked(*arguments: Any) -> int:
            self._seen.add(name)
            declared = call.argtypes or ()
            given = [
                of_type(declared[number])
                if number < len(declared) and isinstance(argument, int)
                else of_argument(argument)
                for number, argument in enumerate(arguments)
            ]
            check(name, given)
            return int(call(*arguments))

        return checked


@pytest.mark.parametrize("name", sorted(cuda_driver._PROTOTYPES))
def test_what_is_declared_is_what_the_header_says(name: str) -> None:
    check(name, [of_type(kind) for kind in cuda_driver._PROTOTYPES[name]])


def test_every_call_has_the_arguments_of_the_header(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides do all they can over the fake driver."""
    seen = set(cuda_driver._PROTOTYPES)
    engine_driver = connector_cuda.Driver(str(library()))
    monkeypatch.setattr(engine_driver, "_library", Watched(engine_driver._library, seen))
    virtual = use_connector(gpu, engine_driver)
    driver = driver_with_kernels(gpu, monkeypatch)
    monkeypatch.setattr(driver, "_cu", Watched(driver._cu, seen))
    plain = driver.function

    def function(name: str, version: int) -> Callable[..., None]:
        call = plain(name, version)

        def checked(*arguments: Any) -> None:
            seen.add(name)
            check(name, [of_argument(argument) for argument in arguments])
            call(*arguments)

        return checked

    monkeypatch.setattr(driver, "function", function)
    use_sidecar(gpu, driver, *virtual)
    assert seen >= names()


def use_connector(gpu: FakeGpu, driver: connector_cuda.Driver) -> tuple[Memory, int]:
    """Export both kinds of memory and write a word; returns virtual memory and its descriptor."""
    page = Pool(4096)
    with driver.on(0):
        driver.export(gpu.alloc(1 << 16), 0)
        address = gpu.alloc(1 << 16, kind="virtual", types=1)
        exported, fd = driver.export(address, 0), driver.export_fd(address)
        connector_cuda.StreamWords(driver, page.address, lambda: 0, 0).close()
    return Memory(0, 1 << 16, "cuda-fd", exported), fd


def use_sidecar(gpu: FakeGpu, driver: Driver, memory: Memory, fd: int) -> None:
    """Open it, compare the ways, and copy to and fro, with batches and without."""
    shape = SHAPES[0]
    layout = shape.layout(GpuEngineMemory(shape.total_bytes))
    for missing, mode in ((False, "auto"), (True, "kernel")):
        gpu.without_batches(missing)
        pool = Pool(1 << 20)
        span = PoolSpan(pool.address, pool.total_bytes, pool.total_bytes, 1 << 16, pool)
        engine = CudaCopyEngine(span, structlog.get_logger(), driver, GpuOptions(mode))
        kept = engine.open(memory, 5, fd)
        for ticket, direction in enumerate(Direction):
            extents = extents_of(layout, [1, 2], [0, 65536], crc=False)
            engine.submit(ticket, direction, extents)
            (result,) = wait_until(engine.collect, "the copy ends")
            assert result.status is CopyStatus.DONE
        assert engine.gpus()
        del kept
        engine.close()


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_laid_out_as_the_headers(name: str) -> None:
    structure, fields = STRUCTURES[name]
    asked = [f"sizeof({name})", *(f"offsetof({name}, {field})" for field in fields)]
    found = values(asked)
    own = [getattr(structure, field).offset for field, *_ in structure._fields_]
    assert [found[one] for one in asked] == [ctypes.sizeof(structure), *own]


def test_numbers_are_those_of_the_header() -> None:
    found = values(name for name, _ in CONSTANTS)
    assert [(name, found[name]) for name, _ in CONSTANTS] == list(CONSTANTS)


def test_every_error_that_ends_a_process_counts_as_a_loss() -> None:
    """With some of hardware and of contexts, after which no copy ends well either."""
    assert HEADER is not None, "skipped without it"
    more = {"ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTEXT_IS_DESTROYED", "ASSERT"}
    assert set(LOST.values()) == cuda_header.last_errors(HEADER) | more


def test_the_fake_driver_takes_what_the_header_says() -> None:
    """Or both sides of a call could be wrong together."""
    texts = SOURCE.read_text() + SOURCE.with_name("fake_stream.h").read_text()
    found = re.findall(r"^int (cu[A-Z]\w+)\(([^)]*)\)", texts, re.M)
    assert {name for name, _ in found} >= names()
    widths = {"int": 4, "unsigned": 4, "unsigned char": 1, "Handle": 64}
    for name, parameters in found:
        if name not in names():
            continue
        kinds = [cuda_header._type_of(one) for one in parameters.split(",")]
        given = [8 if "*" in kind else widths.get(kind, 8) for kind in kinds]
        assert given == [sizes()[kind] for kind in prototypes()[name]], name
