"""kvferry_native: the shared-memory pool, the copy engine and key mixing (C++20)."""

from typing_extensions import Buffer
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

KEY_BYTES: Final = 16
FORMAT_VERSION: Final[int]

class PoolFormatError(Exception):
    """The segment is not a pool of this format version, or its header is damaged."""

class PoolFull(Exception):
    """All 64 size classes hold entries (a lack of space is answered per key, see Pool.reserve)."""

def crc32c(data: Buffer, seed: int = 0) -> int: ...
def crc32c_at(
    addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], seeds: NDArray[np.uint32]
) -> list[int]:
    """CRC32C of ``n`` pieces of this process's memory, without the GIL; arrays are (n,)."""

class Checksums:
    """CRC32C of many pieces by ``threads`` threads (1 to 256), behind the caller. For one thread.

    They keep to the processors of the thread that makes it.
    """

    def __init__(self, threads: int) -> None: ...
    def begin(
        self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], seeds: NDArray[np.uint32]
    ) -> None:
        """Start; arrays are (n,) and copied. The memory is read until ``end`` has returned.

        Raises RuntimeError when what was begun before has not ended.
        """
    def end(self) -> list[int]:
        """Help, wait, and return the checksums; none when nothing was begun."""

def place_memory(nodes: Sequence[int], interleaved: bool) -> None:
    """Bind what the calling thread, and threads that it starts, touch first to NUMA nodes.

    ``interleaved``: page by page over the nodes. It lasts as long as the thread. Raises OSError.
    """
def page_nodes(address: int, stride: int, count: int) -> list[int]:
    """NUMA nodes of ``count`` pages, ``stride`` bytes apart; negative errno: none of this process.

    Raises OSError where the kernel does not say.
    """
def mix_keys(
    namespace: bytes,  # 16 bytes
    group: int,
    end_kind: int,  # 0 full chunk, 1 partial tail
    hashes: Buffer,  # concatenated prefix hashes
    hash_bytes: int,
    first: int,  # index of the first hash to use
    step: int,  # hashes per chunk
) -> NDArray[np.uint8]:  # (n, 16), n = ceil((total - first) / step)
    ...

class PoolStats:
    total_bytes: int  # the arena
    used_bytes: int  # in ready, writing or doomed slots
    ready: int
    writing: int
    doomed: int
    leased: int
    keys_max: int
    evictions: int
    dropped_before_reuse: int  # evicted and never leased
    slabs: int
    slabs_free: int
    quota_evictions: int  # of evictions: an owner's own, to stay within its quota
    pinned_soft: int  # entries
    pinned_hard: int
    pinned_hard_bytes: int

class Pool:
    """A view of one segment: header, index, arena. Not thread safe: the control loop owns it."""

    @staticmethod
    def create(
        fd: int, segment_bytes: int, slab_bytes: int, keys_max: int, epoch: int, threads: int
    ) -> Pool:
        """Format the segment (already sized) and touch every page with `threads` threads."""
    @staticmethod
    def attach(fd: int, epoch: int) -> Pool:
        """Map an existing segment: keep `ready`, free `doomed` and `writing` (see quarantine).

        Raises PoolFormatError.
        """
    @staticmethod
    def segment_bytes_for(arena_bytes: int, slab_bytes: int, keys_max: int) -> int: ...
    @staticmethod
    def own_bytes_for(keys_max: int) -> int:
        """Bytes that a pool takes of its process's own memory, beside the segment."""
    @property
    def address(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def recovered(self) -> tuple[int, int, int]:
        """What attach found: (kept ready, freed writing or doomed, dropped as damaged)."""
    @property
    def was_clean(self) -> bool:
        """Whether the owner before this one closed the pool."""
    def stats(self) -> PoolStats: ...
    def prefix(self, keys: NDArray[np.uint8]) -> int:
        """Number of leading keys (n, 16) that are ready. Touches nothing.

        It and ``present`` look at 32 bits of a key and its place: a key that is not there is taken
        for one that is about once in 10^9. lease compares whole keys.
        """
    def refresh(self, keys: NDArray[np.uint8]) -> None:
        """Mark the leading ready keys recently used, tail first: the head goes last."""
    def present(self, keys: NDArray[np.uint8]) -> NDArray[np.bool_]: ...
    def run(self, keys: NDArray[np.uint8]) -> tuple[int, float]:
        """Number of leading keys that are ready, and why the next one is not.

        -2: it is being written, -1: nothing is known of it (any more) or there is none, else the
        seconds since it was evicted.
        """
    def unheard_of(self, keys: NDArray[np.uint8]) -> bool:
        """Whether the first of ``keys`` is not here, and nothing is known of it (see ``run``)."""
    def lease(self, keys: NDArray[np.uint8], use: bool = True) -> NDArray[np.uint32]:
        """Lease the leading ready keys; returns their entry ids (len <= n).

        Marks them recently used, tail first: within a prefix the tail is evicted before the head.
        Without ``use`` they only cannot be evicted meanwhile: that is no sign of reuse.
        """
    def release(self, entries: NDArray[np.uint32]) -> None:
        """Undo one lease each; a doomed entry is freed with its last lease.

        In the order of the prefix: what is given later is evicted earlier.
        """
    def reserve(
        self,
        keys: NDArray[np.uint8],
        payload_bytes: int,
        shards: int,
        owner: bytes = b"",
        quota_bytes: int = 0,
        group: int = 0,
    ) -> NDArray[np.int64]:
        """Reserve a slot per key (state writing, owned by the caller until commit or abort).

        Per key: entry id, or -1 already ready, -2 being written by another, -3 no space
        (nothing evictable is left, or the index is full). Evicts as needed; never leased,
        writing, hard-pinned or just-reserved entries. payload_bytes is the whole stripe (all
        shards); raises ValueError when it exceeds a slab. ``owner`` is a namespace (16 bytes;
        b"": nobody's). With ``quota_bytes`` the slots of one owner take no more than that: its
        own entries are evicted first. Over 127 owners the next ones are nobody's, without quota.
        ``group`` is only told again by scan.
        """
    def pin(self, entries: NDArray[np.uint32], level: int) -> None:
        """Pin ready entries: 0 not (any more), 1 softly (evicted when nothing else can be), 2 hard
        (never evicted). It outlives the process. Entries that are not ready stay as they are.
        """
    def scan(
        self, first: int, count: int
    ) -> tuple[
        int,
        NDArray[np.uint32],
        NDArray[np.uint8],
        NDArray[np.uint32],
        NDArray[np.uint32],
        NDArray[np.uint32],
        NDArray[np.uint64],
        NDArray[np.uint8],
    ]:
        """The ready ones of ``count`` entries from id ``first`` on.

        Returns the id to go on with (keys_max at the end), and per entry: id, key (16 bytes each,
        flat), owner (see holdings), group, seconds since it was stored, bytes of its slot, pin
        level.
        """
    def holdings(self) -> list[tuple[int, bytes, int, int]]:
        """Per owner that has entries: its number, name (zeros: nobody), entries, bytes."""
    def residence(self) -> tuple[list[float], list[int], float]:
        """How long evicted entries had been ready: bounds in seconds, counts, sum (see Histogram).

        By whole seconds of the wall clock; entries of an earlier process count too.
        """
    def payload_offsets(self, entries: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Byte offset of each payload from `address`."""
    def set_crcs(
        self, entries: NDArray[np.uint32], shard: int, crcs: NDArray[np.uint32]
    ) -> None: ...
    def crcs(
        self, entries: NDArray[np.uint32], shard: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """The stored CRC32C of one shard of each entry, and whether one is stored."""
    def seeds(self, entries: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """CRC seed of each entry, from its key: bytes under a wrong key never verify."""
    def commit(self, entries: NDArray[np.uint32]) -> None:
        """writing -> ready (visible now); order: as given, linked so that the tail goes first."""
    def abort(self, entries: NDArray[np.uint32]) -> None:
        """writing -> free."""
    def doom(self, entries: NDArray[np.uint32]) -> None:
        """Invisible at once; freed now or with the last lease."""
    def clear(self) -> int:
        """Drop every entry that is neither leased, writing nor pinned hard; returns how many."""
    def evict_to(self, used_bytes: int, most: int) -> int:
        """Evict the least recently used until no more than ``used_bytes`` are used.

        At most ``most`` entries; returns how many. What is leased, being written or pinned (softly
        too) stays.
        """
    def take_evicted(self) -> bytes:
        """Keys evicted since the last call, 16 bytes each, oldest first (at most 16,384)."""
    def check(self) -> list[str]:
        """Integrity: index, lists, slot ownership, counters. Empty when sound."""
    def close(self) -> None: ...

class Mapping:
    """A foreign descriptor mapped read-write (MADV_DONTDUMP); closed with its last user.

    ``ahead``: a thread maps the pages of a file that has them all, before the first copies would.
    """

    def __init__(self, fd: int, total_bytes: int, ahead: bool = False) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    def load_u64(self, offset: int) -> int:
        """Atomic acquire load of an aligned word (fence words)."""
    def let_go(self) -> bool:
        """Begin to unmap, by a thread; True when nothing is mapped any more: ask again until then.

        Nothing happens while a Layout, or a copy of it, exists. Use nothing of it afterwards.
        """
    @property
    def sealed(self) -> bool:
        """F_SEAL_SHRINK is set: the peer cannot shrink it under a copy (SIGBUS).

        A memfd without it is refused (ValueError); a file of a mounted tmpfs cannot have it.
        """

class Layout:
    """Runs of one block in a mapping: run r of block b is at offsets[r] + b * strides[r].

    A chunk's payload is the runs in order, packed. Raises ValueError when any run of block 0 or
    num_blocks-1 leaves the mapping.
    """

    def __init__(
        self,
        mapping: Mapping,
        offsets: NDArray[np.int64],
        strides: NDArray[np.int64],
        lengths: NDArray[np.int64],
        num_blocks: int,
    ) -> None: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def num_runs(self) -> int: ...

GATHER: Final = 0  # engine blocks -> pool (save)
SCATTER: Final = 1  # pool -> engine blocks (load)

class Completion:
    ticket: int
    status: int  # 0 done, 1 cancelled, 2 checksum mismatch, 3 injected failure
    moved_bytes: int
    seconds: float
    bad_index: int  # first chunk that failed verification, -1
    crcs: NDArray[np.uint32] | None  # per chunk, gathers with crc=True

class CopyEngine:
    """Copy threads. Completions are announced on `eventfd` and fetched by poll()."""

    def __init__(self, threads: int, jobs_max: int = 65536) -> None: ...
    @property
    def eventfd(self) -> int: ...
    @property
    def pending(self) -> int: ...
    def submit(
        self,
        ticket: int,
        direction: int,
        layout: Layout,
        blocks: NDArray[np.int32],  # (n,), each in 1 .. num_blocks-1 or ValueError
        pool_address: int,
        pool_offsets: NDArray[np.uint64],  # (n,) payload of the shard, from pool_address
        crc: bool,
        seeds: NDArray[np.uint32] | None = None,
        expected: NDArray[np.uint32] | None = None,  # SCATTER with crc: verified
        owner: object = None,  # kept alive until the copy stopped
        pool_bytes: int = 0,  # 0: unknown, offsets are only checked for overflow
    ) -> None: ...
    def cancel(self, ticket: int) -> None:
        """Start no further piece; the completion still comes: cancelled, or done if late."""
    def poll(self) -> list[Completion]: ...
    def close(self) -> None:
        """Stop taking work, drain what runs, join the threads."""
    def inject_failures(self, count: int) -> None:
        """For fault tests: the next `count` jobs end with status 3 after their first piece."""

class Watchdog:
    """A native thread that ends the process by _exit after ``stall_ms`` without a beat.

    It counts its own ticks, so that time in which the process was stopped does not count, and it
    needs no GIL. ``dump_signal`` is raised first: for a handler that prints the threads' stacks.
    ValueError for a stall under 20 ms.
    """

    def __init__(self, stall_ms: int, exit_code: int, dump_signal: int = 0) -> None: ...
    def beat(self) -> None:
        """The loop makes progress."""
    @property
    def gaps(self) -> int:
        """How often the process stood still, and the count began anew."""
    def close(self) -> None:
        """Watch nothing any more."""

class MissCurve:
    """How many tokens would miss in a pool of ``sizes`` times the bytes of this one (SHARDS).

    Not thread safe: the control loop owns it. Keys are buffers of 16 bytes each.
    """

    sizes: ClassVar[list[float]]
    window_s: ClassVar[float]
    def __init__(self, pool_bytes: int, tracked_max: int) -> None:
        """Follow at most ``tracked_max`` keys."""
    def looked_up(
        self,
        keys: NDArray[np.uint8],
        unit: tuple[int, int],
        span: tuple[int, int],
        hit_tokens: int,
        now_s: float,
    ) -> None:
        """Count one lookup of the tokens ``span`` (local, wanted], answered with ``hit_tokens``.

        ``keys`` are of all units of the request; ``unit``: tokens of one, and the bytes to reckon
        with for one that was stored before this start.
        """
    def stored(self, keys: NDArray[np.uint8], total_bytes: int) -> None:
        """Objects were stored: ``keys`` of one group, ``total_bytes`` of all groups.

        What other groups take without a key of this one is borne by the next that come.
        """
    @property
    def whole(self) -> tuple[int, list[float]]:
        """Tokens wanted since the start, and of these missed at each of ``sizes``."""
    @property
    def recent(self) -> tuple[int, list[float]]:
        """The same of this window of ``window_s`` and the one before."""
    @property
    def tracked(self) -> int:
        """Keys that are followed."""
    @property
    def uses(self) -> int:
        """Uses that are kept, at most four times ``tracked_max`` and those of one call."""
    @property
    def sampled(self) -> float:
        """Share of the keys that are followed."""

def observer_of(*histograms: Histogram) -> Callable[..., None]:
    """Return a function that counts one value in each. It raises TypeError for another count."""

class Histogram:
    """Counts of values by bucket; ``bounds`` ascend. Not thread safe.

    Its functions are made anew whenever they are named: who calls them often keeps them.
    """

    def __init__(self, bounds: Sequence[float]) -> None: ...
    @property
    def observe(self) -> Callable[[float], None]:
        """Count one value, in the first bucket whose bound it does not exceed."""
    @property
    def begin(self) -> Callable[[], None]:
        """Begin to measure a time (monotonic)."""
    @property
    def end(self) -> Callable[[], None]:
        """Count the seconds since ``begin``."""
    @property
    def counts(self) -> list[int]:
        """Values per bucket; the last one holds those above every bound."""
    @property
    def sum(self) -> float:
        """Sum of the values."""
