"""Virtual memory of another process, mapped by its descriptor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog
from kvferry_connector.cuda import Driver as EngineDriver
from kvferry_connector.wire.attach import Memory
from kvferry_sidecar.engines.cuda_driver import CudaError, Driver
from kvferry_sidecar.engines.cuda_memory import CudaMemories
from support.fake_cuda import FakeGpu, bytes_at, library

ALLOCATION_BYTES = 1 << 16
MAPPING = (
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
)


@pytest.fixture
def memories(gpu: FakeGpu) -> CudaMemories:
    return CudaMemories(Driver(str(library())), structlog.get_logger())


@pytest.fixture
def virtual(gpu: FakeGpu) -> Iterator[tuple[Memory, int]]:
    """Virtual memory, as the connector exports it, and its descriptor."""
    address = gpu.alloc(ALLOCATION_BYTES, device=1, kind="virtual", types=1)
    bytes_at(address, ALLOCATION_BYTES)[:] = 42
    exporter = EngineDriver(str(library()))
    with exporter.on(1):
        cuda = exporter.export(address + 4096, 1)
        fd = exporter.export_fd(address)
    gpu.forget()
    yield Memory(0, 8192, "cuda-fd", cuda), fd
    os.close(fd)


def test_virtual_memory_is_mapped_by_its_descriptor(
    gpu: FakeGpu, memories: CudaMemories, virtual: tuple[Memory, int]
) -> None:
    memory, fd = virtual
    first = memories.open(memory, 5, fd)
    assert (bytes_at(first.address, 8192) == 42).all()
    assert gpu.handles() == 0, "the mapping alone holds the memory"
    calls = [call for call in gpu.calls() if call.startswith("cuMem")]
    assert calls == [*MAPPING[:3], "cuMemRelease", "cuMemSetAccess"]
    second = memories.open(memory, 5, fd)
    assert second.address != first.address, "another descriptor may be of other memory"
    assert memories.mapped_bytes(1) == 2 * ALLOCATION_BYTES
    assert memories.mapped_bytes(0) == 0
    del first, second
    assert (gpu.mapped(), len(memories)) == (0, 0)
    assert gpu.calls("cuMemUnmap") == ["cuMemUnmap"] * 2
    assert gpu.calls("cuMemAddressFree") == ["cuMemAddressFree"] * 2


@pytest.mark.parametrize("name", MAPPING)
def test_a_mapping_that_fails_half_way_leaves_nothing(
    gpu: FakeGpu, memories: CudaMemories, virtual: tuple[Memory, int], name: str
) -> None:
    memory, fd = virtual
    gpu.fail(name, 2)
    with pytest.raises(CudaError, match=f"{name} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        memories.open(memory, 5, fd)
    gpu.fail("", 0)
    assert (gpu.mapped(), len(memories)) == (0, 0)
    assert len(gpu.calls("cuMemAddressFree")) == len(gpu.calls("cuMemAddressReserve")) - (
        name == "cuMemAddressReserve"
    )
    assert gpu.handles() == (name == "cuMemRelease")


def test_the_number_of_anothers_descriptor_opens_nothing(
    gpu: FakeGpu, memories: CudaMemories, virtual: tuple[Memory, int]
) -> None:
    with pytest.raises(CudaError, match="UNKNOWN"):
        memories.open(virtual[0], 5, 4000)
    with pytest.raises(CudaError, match="no handle of 64"):
        memories.open(virtual[0], 5)
    assert gpu.mapped() == 0
