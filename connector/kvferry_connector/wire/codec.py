"""Frames of the hot channel.

``[header, body, *raw]``: the header is 24 bytes (magic, protocol, number of raw frames, epoch,
generation), the body one msgpack message of hot.py, raw frames are bulk numbers. The bounds here
hold for both directions; what breaks one is refused with the number that was broken.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from kvferry_connector.wire.hot import FromHalf, FromSidecar, Job

MAGIC = b"KVFY"
HEADER = struct.Struct("<4sHHQQ")
body_bytes_max = 1 << 20
raw_frames_max = 2
raw_bytes_max = 64 << 20
id_chars_max = 512
ids_max = 1024  # that one Release or OutcomeAck lists
error_chars_max = 256  # of a decoder's error: it quotes what it met, which may be very long

Frame = bytes | bytearray | memoryview
T = TypeVar("T")


class WireError(Exception):
    """A frame that is not ours, not of this protocol, or larger than a bound."""


class Header(NamedTuple):
    """Who a frame belongs to; a stale (epoch, generation) is refused before the body is read."""

    protocol: int
    raw_frames: int
    epoch: int
    generation: int


_encoder = msgspec.msgpack.Encoder()
_from_half: msgspec.msgpack.Decoder[FromHalf] = msgspec.msgpack.Decoder(FromHalf)
_from_sidecar: msgspec.msgpack.Decoder[FromSidecar] = msgspec.msgpack.Decoder(FromSidecar)
_job: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)


def pack(
    message: FromHalf | FromSidecar,
    raw: Sequence[Frame],
    *,
    protocol: int,
    epoch: int,
    generation: int,
) -> list[Frame]:
    """Return the ZeroMQ frames of one message."""
    head = HEADER.pack(MAGIC, protocol, len(raw), epoch, generation)
    return [head, _encoder.encode(message), *raw]


def encode_job(job: Job) -> bytes:
    """Encode a job once; the bytes travel unchanged through every worker."""
    return _encoder.encode(job)


def read_header(frames: Sequence[Frame]) -> Header:
    """Check the outer form of a received message and return its header.

    Raises WireError for a foreign magic, a wrong number of frames, or a frame over its bound.
    """
    if not 2 <= len(frames) <= 2 + raw_frames_max:
        raise WireError(f"{len(frames)} frames; a message has 2 to {2 + raw_frames_max}")
    if len(frames[0]) != HEADER.size:
        raise WireError(f"header of {len(frames[0])} bytes; it has {HEADER.size}")
    magic, protocol, raw_frames, epoch, generation = HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise WireError(f"magic {magic!r} is not {MAGIC!r}")
    if raw_frames != len(frames) - 2:
        raise WireError(f"header announces {raw_frames} raw frames, {len(frames) - 2} came")
    if len(frames[1]) > body_bytes_max:
        raise WireError(f"body of {len(frames[1])} bytes is over {body_bytes_max}")
    for frame in frames[2:]:
        if len(frame) > raw_bytes_max:
            raise WireError(f"raw frame of {len(frame)} bytes is over {raw_bytes_max}")
    return Header(protocol, raw_frames, epoch, generation)


def read_from_half(body: Frame) -> FromHalf:
    """Decode a body sent by a half. Raises WireError when it is no such message."""
    return _read(_from_half, body)


def read_from_sidecar(body: Frame) -> FromSidecar:
    """Decode a body sent by the sidecar. Raises WireError when it is no such message."""
    return _read(_from_sidecar, body)


def read_job(body: Frame) -> Job:
    """Decode the job inside a Submit. Raises WireError when it is none."""
    return _read(_job, body)


def _read(decoder: msgspec.msgpack.Decoder[T], body: Frame) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"body is no message of ours: {brief(error)}") from error


def brief(error: Exception) -> str:
    """Return a decoder's error as text of at most ``error_chars_max`` characters."""
    text = str(error)
    return text if len(text) <= error_chars_max else f"{text[: error_chars_max - 3]}..."
