"""/livez, /readyz, /startupz and /metrics: all that the port of a pod network serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvferry_sidecar.observe import metrics
from kvferry_sidecar.observe.http.window import UnavailableError, Window
from kvferry_sidecar.observe.reading import Reading

probe_s_max = 0.8  # a kubelet waits a second


class Check(NamedTuple):
    """One line of a probe's answer."""

    name: str
    ok: bool
    text: str


def routes(window: Window) -> list[Route]:
    """Return the routes of the probes and the metrics."""

    async def livez(request: Request) -> Response:
        stalled_s = window.stalled_s()
        text = "turns" if stalled_s is None else f"no turn for {stalled_s:.1f} s"
        return _answer(request, [Check("loop", stalled_s is None, text)])

    async def startupz(request: Request) -> Response:
        started = window.desk is not None
        return _answer(request, [Check("pool", started, "ready" if started else _made(window))])

    async def readyz(request: Request) -> Response:
        try:
            reading = await window.ask(lambda desk, now_s: desk.reading(now_s), probe_s_max)
        except UnavailableError as error:
            return _answer(request, [Check("loop", False, str(error))])
        return _answer(request, readiness(reading))

    async def exposition(request: Request) -> Response:
        try:
            reading = await window.reading()
        except UnavailableError as error:
            if window.last is None:
                return PlainTextResponse(f"{error}\n", 503)
            reading = window.last  # kvferry_loop_lag_seconds says how old it is
        reading = replace(reading, paths=await asyncio.to_thread(window.paths))
        body, kind = metrics.exposition(reading, request.headers.get("accept", ""))
        return Response(body, media_type=None, headers={"content-type": kind})

    handlers: dict[str, Callable[..., object]] = {
        "/livez": livez,
        "/readyz": readyz,
        "/startupz": startupz,
        "/metrics": exposition,
    }
    return [Route(path, handler, methods=["GET"]) for path, handler in handlers.items()]


def readiness(reading: Reading) -> list[Check]:
    """Return what decides whether engines are served: all ranks of those that attached."""
    checks = [Check("draining", not reading.pipeline.draining, reading.document.state)]
    pool = reading.document.pool
    size = "none" if pool is None else f"{pool.total_bytes} bytes, {pool.ready} objects"
    checks.append(Check("pool", pool is not None, size))
    for session in reading.document.sessions:
        there = {half.rank for half in session.halves if half.registered and half.rank >= 0}
        missing = sorted(set(session.ranks) - there)
        name = f"engine {session.engine_id}/{session.instance_id}"
        if session.ready:
            text = f"ranks {session.ranks} are registered at epoch {reading.document.epoch}"
        elif missing:
            text = f"ranks {missing} are not registered: see the engine's log"
        else:
            text = "its scheduler half is not registered: see the engine's log"
        checks.append(Check(name, session.ready, text))
    return checks


def _made(window: Window) -> str:
    """Return how far the pool is, which takes minutes for a large one."""
    works = [f", {one.done} of {one.total} {one.unit}" for one in window.progress()]
    return "is being made" + "".join(works)


def _answer(request: Request, checks: list[Check]) -> Response:
    ok = all(check.ok for check in checks)
    if ok and "verbose" not in request.query_params:
        return PlainTextResponse("ok\n")
    lines = [f"[{'+' if c.ok else '-'}] {c.name}: {c.text}" for c in checks]
    return PlainTextResponse("\n".join(lines) + "\n", 200 if ok else 503)
