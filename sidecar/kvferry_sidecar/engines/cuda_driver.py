"""The CUDA driver by ctypes: prototypes, contexts, and one table of errors with their remedies.

The driver's library is all that is needed: no toolkit, no runtime, nothing to install. Calls give
the interpreter away while they run. Contexts are the primary ones, made at the first use of a GPU
and kept: each costs some hundred MiB of that GPU's memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
UUID_BYTES = 16
HANDLE_BYTES = 64
_ADDRESS = c_uint64  # CUdeviceptr
_NON_BLOCKING = 1  # a stream that does not wait for the default one
_SLEEPS, _NO_TIMING = 1, 2  # of an event: who waits for it does not spin; nobody asks when it came
_LAZY_PEER_ACCESS = 1  # the only flag of cuIpcOpenMemHandle
_PORTABLE_AND_MAPPED = 3
_NOT_FOUND = 500
_IPC_SUPPORTED = 125  # CUdevice_attribute: events of other processes, and so memory


class IpcHandle(ctypes.Structure):
    """Passed by value, so it has to be a structure."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)  # c_char would end at the first zero


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2."""

    _fields_ = (
        ("srcXInBytes", c_size_t), ("srcY", c_size_t), ("srcMemoryType", c_int),
        ("srcHost", c_void_p), ("srcDevice", _ADDRESS), ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t), ("dstY", c_size_t), ("dstMemoryType", c_int),
        ("dstHost", c_void_p), ("dstDevice", _ADDRESS), ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t), ("Height", c_size_t),
    )  # fmt: skip


MEMORY_HOST, MEMORY_DEVICE = 1, 2  # CUmemorytype
_POSIX_FD = 1  # CUmemAllocationHandleType
_ON_DEVICE, _READ_WRITE = 1, 3  # CUmemLocationType, CUmemAccess_flags


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("kind", c_int), ("device", c_int), ("flags", c_int))


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (POINTER(c_char * UUID_BYTES), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuInit": (c_uint,),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuIpcOpenMemHandle_v2": (POINTER(_ADDRESS), IpcHandle, c_uint),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemAddressReserve": (POINTER(_ADDRESS), c_size_t, c_size_t, _ADDRESS, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpy2DAsync_v2": (POINTER(Copy2D), c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
}
_OLD_DRIVER = "the driver is too old for this: install a newer one"
_OTHER_LIBRARY = (
    "the container's libcuda is not of the node's driver: let the NVIDIA runtime mount it, and "
    "have no stub and no cuda-compat in the image"
)
_NVRTC = "other ways of copying are used: install the extra of kvferry (cuda12, cuda13) for the GPU"
_MPS = "this container has an MPS pipe: take CUDA_MPS_PIPE_DIRECTORY away from the sidecar"
# code: (name, what it means here and what to do)
ERRORS: dict[int, tuple[str, str]] = {
    1: (
        "INVALID_VALUE",
        "the memory was not allocated by cudaMalloc, or its handle is damaged: turn sleep mode and "
        "expandable segments of the engine off",
    ),
    2: (
        "OUT_OF_MEMORY",
        "free some memory of the GPU (lower gpu_memory_utilization of the engine) or make the host "
        "pool smaller",
    ),
    3: ("NOT_INITIALIZED", "look whether nvidia-smi works in this container"),
    34: ("STUB_LIBRARY", _OTHER_LIBRARY),
    36: ("CALL_REQUIRES_NEWER_DRIVER", _OLD_DRIVER),
    46: (
        "DEVICE_UNAVAILABLE",
        "another process has the GPU alone: set its compute mode to Default (nvidia-smi -c 0)",
    ),
    100: ("NO_DEVICE", "give the sidecar the GPUs of the engines (NVIDIA_VISIBLE_DEVICES=all)"),
    101: ("INVALID_DEVICE", "give the sidecar every GPU of the node (NVIDIA_VISIBLE_DEVICES=all)"),
    201: (
        "INVALID_CONTEXT",
        "engine and sidecar have equal process ids in two PID namespaces: share the namespace "
        "(shareProcessNamespace, hostPID)",
    ),
    205: (
        "MAP_FAILED",
        "the engine's memory cannot be reached: give the sidecar the same GPU by the NVIDIA "
        "runtime (not by CDI or DRA), or the engine has ended",
    ),
    208: ("ALREADY_MAPPED", "another library in this process has opened it: report it"),
    217: ("PEER_ACCESS_UNSUPPORTED", "give the sidecar the GPU that holds the memory"),
    209: ("NO_BINARY_FOR_GPU", _NVRTC),
    221: ("JIT_COMPILER_NOT_FOUND", _NVRTC),
    222: (
        "UNSUPPORTED_PTX_VERSION",
        "NVRTC is newer than the driver: install kvferry[cuda12], or a newer driver",
    ),
    400: ("INVALID_HANDLE", "a stream or module of a lost context: restart the sidecar"),
    500: ("NOT_FOUND", _OLD_DRIVER),
    304: ("OPERATING_SYSTEM", "raise the memlock limit (LimitMEMLOCK=infinity, IPC_LOCK)"),
    712: ("HOST_MEMORY_ALREADY_REGISTERED", "another library has registered the pool: report it"),
    713: ("HOST_MEMORY_NOT_REGISTERED", "report it with this text"),
    711: ("TOO_MANY_PEERS", "give the sidecar the GPU that holds the memory"),
    800: ("NOT_PERMITTED", "the container or sandbox forbids it: use the NVIDIA runtime"),
    801: ("NOT_SUPPORTED", "MIG, WSL, Tegra and confidential computing are not served"),
    802: ("SYSTEM_NOT_READY", "start the node's nvidia-fabricmanager"),
    803: ("SYSTEM_DRIVER_MISMATCH", _OTHER_LIBRARY),
    804: ("COMPAT_NOT_SUPPORTED_ON_DEVICE", _OTHER_LIBRARY),
    805: ("MPS_CONNECTION_FAILED", _MPS),
    807: ("MPS_SERVER_NOT_READY", _MPS),
    808: ("MPS_MAX_CLIENTS_REACHED", _MPS),
    999: (
        "UNKNOWN",
        "look into the kernel's log for lines with Xid; for a descriptor: it came from no driver",
    ),
}


# After one of these every call on that GPU fails, until another process makes a context.
LOST = {
    214: "ECC_UNCORRECTABLE", 220: "NVLINK_UNCORRECTABLE", 226: "CONTAINED",
    700: "ILLEGAL_ADDRESS", 702: "LAUNCH_TIMEOUT", 709: "CONTEXT_IS_DESTROYED", 710: "ASSERT",
    714: "HARDWARE_STACK_ERROR", 715: "ILLEGAL_INSTRUCTION", 716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE", 718: "INVALID_PC", 719: "LAUNCH_FAILED",
    721: "TENSOR_MEMORY_LEAK", 810: "MPS_CLIENT_TERMINATED", 911: "EXTERNAL_DEVICE",
}  # fmt: skip
_LOST_REMEDY = (
    "the GPU's context is lost, and this sidecar ends so that a new one gets another; look into "
    "the kernel's log for lines with Xid"
)
ERRORS |= {code: (name, _LOST_REMEDY) for code, name in LOST.items()}


class CudaError(Exception):
    """A call of the driver failed, or it is not there. ``code`` is 0 in the latter case."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def error_of(call: str, code: int) -> CudaError:
    """Return the error of a failed call, with what to do about it."""
    name, remedy = ERRORS.get(code, (str(code), "look it up in the CUDA driver's documentation"))
    return CudaError(f"{call} failed: CUDA_ERROR_{name} ({code}); {remedy}", code)


class Driver:
    """The driver and the GPUs this process sees. Raises CudaError when there is none."""

    def __init__(self, library: str = LIBRARY) -> None:
        # Read by the driver as it begins; whoever has set it keeps it. Drivers before CUDA 12.2
        # else load every kernel of a module, and with them GPU memory that nobody uses.
        ctypes.CDLL(None).setenv(b"CUDA_MODULE_LOADING", b"LAZY", 0)
        try:
            self._cu = ctypes.CDLL(library)
            for name, types in _PROTOTYPES.items():
                getattr(self._cu, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise CudaError(
                f"there is no CUDA driver here ({error}); give the container access to the GPUs "
                "(runtimeClassName: nvidia, NVIDIA_VISIBLE_DEVICES=all)"
            ) from error
        self.lost: CudaError | None = None  # the first that lost a context
        self("cuInit", 0)
        # A collection of garbage may close memory of a GPU at any point, on this thread too.
        self._lock = threading.RLock()
        self._contexts: dict[int, c_void_p] = {}
        count = c_int()
        self("cuDeviceGetCount", byref(count))
        self._ordinals = {self._uuid(ordinal): ordinal for ordinal in range(count.value)}

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call one function. Raises CudaError, also when this driver has none of that name."""
        try:
            function = getattr(self._cu, name)
        except AttributeError:
            raise error_of(name, _NOT_FOUND) from None
        self._check(name, int(function(*arguments)))

    def _check(self, name: str, code: int) -> None:
        if not code:
            return
        if code in LOST and self.lost is None:
            self.lost = error_of(name, code)
        # Not the one that is kept, nor one with a name here: it would keep the frames that it
        # passes on its way, and with them an engine's memory mapped.
        raise error_of(name, code)

    def function(self, name: str, version: int) -> Callable[..., None]:
        """Return a function with the signature it has in a CUDA version. Raises CudaError.

        Asked for by version: the same name has other arguments in other libraries.
        """
        found, status = c_void_p(), c_int()
        name_, version_ = name.encode(), c_int(version)
        self("cuGetProcAddress_v2", name_, byref(found), version_, c_uint64(0), byref(status))
        if not found.value:
            raise error_of(name, _NOT_FOUND)
        call = ctypes.CFUNCTYPE(c_int)(found.value)

        def checked(*arguments: Any) -> None:
            self._check(name, int(call(*arguments)))

        return checked

    def ordinal_of(self, uuid: bytes) -> int:
        """Return this process's number of a GPU. Raises CudaError when it does not see that one."""
        try:
            return self._ordinals[uuid]
        except KeyError:
            raise CudaError(
                f"the engine's GPU {uuid.hex()} is none of the {len(self._ordinals)} that the "
                "sidecar sees; give it every GPU of the node (NVIDIA_VISIBLE_DEVICES=all)",
                100,
            ) from None

    def uuid_of(self, ordinal: int) -> bytes:
        """Return the UUID of a GPU. Raises StopIteration for one that is not there."""
        return next(uuid for uuid, number in self._ordinals.items() if number == ordinal)

    def version(self) -> int:
        """Return the version of CUDA that the driver has: 13000 is 13.0. Raises CudaError."""
        found = c_int()
        self("cuDriverGetVersion", byref(found))
        return found.value

    @property
    def count(self) -> int:
        """How many GPUs this process sees."""
        return len(self._ordinals)

    def opens_memory(self, ordinal: int) -> bool:
        """Say whether a GPU's memory can be opened by another process. Raises CudaError."""
        device, found = c_int(), c_int()
        self("cuDeviceGet", byref(device), ordinal)
        self("cuDeviceGetAttribute", byref(found), _IPC_SUPPORTED, device)
        return bool(found.value)

    @property
    def used(self) -> list[int]:
        """The GPUs that have a context of ours."""
        return sorted(self._contexts)

    def memory(self, ordinal: int) -> tuple[int, int]:
        """Return the free and all bytes of a GPU. Raises CudaError."""
        free, total = c_size_t(), c_size_t()
        self.use(ordinal)
        self("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def bus_id(self, ordinal: int) -> str:
        """Return where a GPU is on the PCI bus, as sysfs names it. Raises CudaError."""
        text, device = ctypes.create_string_buffer(32), c_int()
        self("cuDeviceGet", byref(device), ordinal)
        self("cuDeviceGetPCIBusId", text, c_int(32), device)
        return text.value.decode()

    def use(self, ordinal: int) -> None:
        """Make a GPU the current one of this thread; its context is made at the first use."""
        with self._lock:
            context = self._contexts.get(ordinal)
            if context is None:
                context, device = c_void_p(), c_int()
                self("cuDeviceGet", byref(device), ordinal)
                self("cuDevicePrimaryCtxRetain", byref(context), device)
                self._contexts[ordinal] = context
        self("cuCtxSetCurrent", context)

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Have a GPU current inside the block; what was current before is so again after it."""
        before = c_void_p()
        self("cuCtxGetCurrent", byref(before))
        self.use(ordinal)
        try:
            yield
        finally:
            self("cuCtxSetCurrent", before)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation on the current GPU; returns its address here."""
        address, by_value = _ADDRESS(), IpcHandle.from_buffer_copy(handle)
        self("cuIpcOpenMemHandle_v2", byref(address), by_value, _LAZY_PEER_ACCESS)
        return int(address.value)

    def map_fd(self, ordinal: int, fd: int, total_bytes: int) -> int:
        """Map another process's virtual memory for one GPU; returns its address here.

        ``fd`` may be closed then: the mapping holds the memory. Raises CudaError, and leaves
        nothing behind.
        """
        handle, address = c_uint64(), _ADDRESS()
        self("cuMemImportFromShareableHandle", byref(handle), fd, _POSIX_FD)
        with ExitStack() as undo:
            try:
                self("cuMemAddressReserve", byref(address), total_bytes, 0, 0, 0)
                undo.callback(self, "cuMemAddressFree", address.value, total_bytes)
                self("cuMemMap", address.value, total_bytes, 0, handle.value, 0)
                undo.callback(self, "cuMemUnmap", address.value, total_bytes)
            finally:
                self("cuMemRelease", handle.value)
            self.allow(ordinal, address.value, total_bytes)
            undo.pop_all()
        return int(address.value)

    def allow(self, ordinal: int, address: int, total_bytes: int) -> None:
        """Let a GPU read and write virtual memory that is mapped. Raises CudaError."""
        device = c_int()
        self("cuDeviceGet", byref(device), ordinal)
        access = _Access(_ON_DEVICE, device.value, _READ_WRITE)
        self("cuMemSetAccess", address, total_bytes, byref(access), 1)

    def unmap(self, address: int, total_bytes: int) -> None:
        """Give back what ``map_fd`` mapped, on its GPU. Raises CudaError."""
        self("cuMemUnmap", address, total_bytes)
        self("cuMemAddressFree", address, total_bytes)

    def stream(self) -> c_void_p:
        """Return a new stream of the current GPU that never waits for the default one."""
        stream = c_void_p()
        self("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream

    def event(self) -> c_void_p:
        """Return a new event of the current GPU."""
        event = c_void_p()
        self("cuEventCreate", byref(event), _SLEEPS | _NO_TIMING)
        return event

    def pin(self, address: int, total_bytes: int) -> None:
        """Register host memory for all GPUs of this process."""
        self("cuMemHostRegister_v2", address, total_bytes, _PORTABLE_AND_MAPPED)

    def _uuid(self, ordinal: int) -> bytes:
        device, uuid = c_int(), (c_char * UUID_BYTES)()
        self("cuDeviceGet", byref(device), ordinal)
        self("cuDeviceGetUuid_v2", byref(uuid), device)
        return ctypes.string_at(uuid, UUID_BYTES)
