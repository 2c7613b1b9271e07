"""/debug/bundle: everything support asks for, as one ZIP. Holds no token and no prompt."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
import traceback
import zipfile

import msgspec

from kvferry_sidecar.observe import metrics, verdicts
from kvferry_sidecar.observe.http.window import UnavailableError, Window

requests_max = 2000


async def pack(window: Window) -> bytes:
    """Return the bundle; where the loop does not answer, one of what there is without it."""
    files: dict[str, bytes] = {"stacks.txt": stacks().encode()}
    if window.desk is not None:
        files["events.json"] = _json(window.desk.events())
        files["config.json"] = _json(window.desk.settings())
    files["doctor.json"] = _json(await asyncio.to_thread(window.doctor))
    try:
        reading = await window.reading()
        files["status.json"] = _json(reading.document)
        files["metrics.txt"] = metrics.exposition(reading)[0]
        files["jobs.json"] = _json(await window.ask(lambda desk, now_s: desk.jobs(now_s)))
        files["leases.json"] = _json(await window.ask(lambda desk, now_s: desk.leases(now_s)))
        records = await window.ask(lambda desk, now_s: desk.records(now_s))
        now_s = time.monotonic()
        views = [verdicts.view(one, now_s, timeline=True) for one in records[-requests_max:]]
        files["requests.json"] = _json(views)
    except UnavailableError as error:
        files["unavailable.txt"] = str(error).encode()
    return await asyncio.to_thread(_zip, files)


def stacks() -> str:
    """Return where every thread stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(ident, ident)}\n{lines}")
    return "\n".join(parts)


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1)


def _zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, body in files.items():
            packed.writestr(f"kvferry/{name}", body)
    return out.getvalue()
