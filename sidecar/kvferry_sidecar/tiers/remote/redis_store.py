"""Redis or Valkey as a store: one string per object, header and payload together.

Each call is one pipeline, of GETRANGEs or SETs, over one connection per thread. The
client's socket deadline is ours, and it retries nothing: a tier that failed is tried again by the
pipeline. A server without memory refuses single SETs; those objects are not stored, no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote

from kvferry_sidecar.errors import ConfigError, MissingExtraError
from kvferry_sidecar.slow_tiers import RemoteTierConfig
from kvferry_sidecar.tiers.store import Item, Source, StoreError
from kvferry_sidecar.tiers.value import HEADER_BYTES, VALUE_FORMAT

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtraError(
        "tiers.remote.url names Redis, and its client is not installed",
        "pip install 'kvferry[redis]'",
    ) from error

PREFIX = b"kvferry:%d:" % VALUE_FORMAT
value_bytes_limit = 512 << 20  # of a string in Redis
read_bytes = 1 << 20  # of an answer in one step


class RedisStore:
    """One server. Raises StoreError when it is away or too slow."""

    source: Source = "external"
    batch_max = 256

    def __init__(
        self, client: redis.Redis, where: str, transport: str, remote: RemoteTierConfig
    ) -> None:
        self.name = f"redis {where}"
        self.value_bytes_max = min(remote.value_bytes_max, value_bytes_limit - HEADER_BYTES)
        self._client = client
        self._where = where
        self._transport = transport
        self._ttl_s = remote.ttl_s or None
        self._refused = 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See Store."""
        if not keys:
            return []
        names = [PREFIX + key for key in keys]
        with _told():
            count = self._client.exists(*names)
            if count in (0, len(names)):  # a prefix that is new, or whole: one answer says it
                return [count > 0] * len(names)
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.exists(name)
                return [bool(answer) for answer in pipe.execute()]

    def get(self, items: Sequence[Item]) -> list[bytes | None]:
        """See Store."""
        if not items:
            return []
        # Not MGET: a value may be of any size, and no more is read than could be ours.
        asked = [
            ("GETRANGE", PREFIX + item.key, 0, HEADER_BYTES + item.form.payload_bytes)
            for item in items
        ]
        with _told(), self._connection() as connection:
            connection.send_packed_command(connection.pack_commands(asked))
            return [_take(item, _answer(connection)) for item in items]

    def put(self, items: Sequence[Item], headers: Sequence[bytes]) -> list[bool]:
        """See Store."""
        if not items:
            return []
        with _told(), self._connection() as connection:
            connection.send_packed_command(self._sets(items, headers))
            stored = [_answer(connection) == b"OK" for _ in items]
        self._refused += stored.count(False)  # out of memory, or read-only
        return stored

    def remove(self, keys: Sequence[bytes]) -> None:
        """See Store."""
        if keys:
            with _told():
                self._client.unlink(*(PREFIX + key for key in keys))

    def facts(self) -> dict[str, str | int]:
        """See Store."""
        return {
            "transport": self._transport,
            "address": self._where,
            "ttl_s": self._ttl_s or 0,
            "puts_refused": self._refused,
        }

    def close(self) -> None:
        """See Store."""
        self._client.close()

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Yield a connection of the pool's: it closes itself when it fails half-way."""
        pool = self._client.connection_pool
        connection: Any = pool.get_connection()
        try:
            yield connection
        finally:
            pool.release(connection)

    def _sets(self, items: Sequence[Item], headers: Sequence[bytes]) -> list[bytes | memoryview]:
        """Return one SET per object in the protocol's words, its payload where it lies.

        The client's own SET takes a value as one piece: it would cost a copy of every payload.
        """
        words, closing = b"*3", b"\r\n"
        if self._ttl_s:
            seconds = b"%d" % self._ttl_s
            words, closing = b"*5", b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(seconds), seconds)
        parts: list[bytes | memoryview] = []
        before = b""
        for item, header in zip(items, headers, strict=True):
            name, payload = PREFIX + item.key, item.payload()
            lengths = len(name), name, len(header) + len(payload), header
            parts.append(before + words + b"\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % lengths)
            parts.append(payload)
            before = closing
        return [*parts, before]


def open_redis(remote: RemoteTierConfig, parts: SplitResult, call_s_max: float) -> RedisStore:
    """Return the store of a URL: redis://HOST:PORT/DB, rediss:// with TLS, redis+unix:///PATH."""
    settings: dict[str, Any] = {
        "username": unquote(parts.username) if parts.username else None,
        "password": _password(remote.password_file),
        "socket_timeout": call_s_max,
        "socket_connect_timeout": min(1.0, call_s_max),
        "socket_read_size": read_bytes,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "max_connections": remote.threads + 1,
    }
    kind: type[Any]
    try:
        if parts.scheme == "redis+unix":
            where, transport, kind = parts.path, "unix", redis.UnixDomainSocketConnection
            settings |= {"path": parts.path}
        else:
            host, port = parts.hostname or "127.0.0.1", parts.port or 6379
            where, transport, kind = f"{host}:{port}", "tcp", redis.Connection
            if parts.scheme == "rediss":
                transport, kind = "tls", redis.SSLConnection
            settings |= {
                "host": host,
                "port": port,
                "db": int(parts.path.strip("/") or 0),
                "socket_keepalive": True,
            }
    except ValueError as error:
        raise ConfigError(
            f"tiers.remote.url {remote.url!r} cannot be read: {error}",
            "write redis://HOST:PORT/DB",
        ) from error
    pool = redis.ConnectionPool(connection_class=kind, **settings)
    return RedisStore(redis.Redis.from_pool(pool), where, transport, remote)


def _password(file: str) -> str | None:
    if not file:
        return None
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"tiers.remote.password_file {file} cannot be read: {error.strerror}",
            "name a file that this user can read",
        ) from error


def _answer(connection: Any) -> object:
    """Read the next answer, None for a refusal: the others of the call stand."""
    try:
        answer: object = connection.read_response()
    except redis.ResponseError:
        return None
    return answer


def _take(item: Item, value: object) -> bytes | None:
    """Copy a value into place; one of another length is none of ours, and fails its header."""
    if not isinstance(value, bytes) or not value:
        return None
    if len(value) == HEADER_BYTES + item.form.payload_bytes:
        item.payload()[:] = memoryview(value)[HEADER_BYTES:]
        return value[:HEADER_BYTES]
    return b""


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error
