"""kvferry_native: the shared-memory pool, the copy engine and key mixing (C++20)."""

from kvferry_native._native import (
    FORMAT_VERSION,
    GATHER,
    KEY_BYTES,
    SCATTER,
    Completion,
    CopyEngine,
    Layout,
    Mapping,
    Pool,
    PoolFormatError,
    PoolFull,
    PoolStats,
    Watchdog,
    crc32c,
    mix_keys,
)

__all__ = [
    "FORMAT_VERSION",
    "GATHER",
    "KEY_BYTES",
    "SCATTER",
    "Completion",
    "CopyEngine",
    "Layout",
    "Mapping",
    "Pool",
    "PoolFormatError",
    "PoolFull",
    "PoolStats",
    "Watchdog",
    "crc32c",
    "mix_keys",
]
