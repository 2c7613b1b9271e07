"""/api/v1: what `kvferry status`, the page and other tools read. GET reads, POST acts."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvferry_sidecar.doctor.engines import check_engines
from kvferry_sidecar.doctor.finding import warn
from kvferry_sidecar.errors import RequestError
from kvferry_sidecar.observe import verdicts
from kvferry_sidecar.observe.http import bundle
from kvferry_sidecar.observe.http.guard import fault
from kvferry_sidecar.observe.http.window import UnavailableError, Window
from kvferry_sidecar.outcomes.ledger import STAGES
from kvferry_sidecar.outcomes.records import Record, hottest
from kvferry_sidecar.stages.objects import Filter, disk_page

PREFIX = "/api/v1"
listed_max = 500  # requests of one answer
prefixes_listed_max = 100
objects_listed_max = 1000
tokens_max = 1 << 24
slow_max = 50
explained_max = 20  # admissions of one request that are told
body_bytes_max = 64 << 10
stream_s = 1.0  # between two events of the stream
streams_max = 32  # of one socket: each asks the control loop every second
_PAGING = ("tier", "first", "after", "limit")  # parameters beside a filter's
_FITS = ("engine", "reason", "load")  # fields of a request by which it is chosen
_KEY = re.compile(r"([0-9a-f]{32})?")
Handler = Callable[[Request], Awaitable[Any]]


class Api:
    """The handlers; each returns what is encoded as JSON."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._streams = 0
        self.gets: dict[str, Handler] = {
            "": self.index,
            "nodes": self.nodes,
            "status": self.status,
            "sessions": self.sessions,
            "tiers": self.tiers,
            "paths": self.paths,
            "curve": self.curve,
            "jobs": self.jobs,
            "leases": self.leases,
            "prefixes": self.prefixes,
            "namespaces": self.namespaces,
            "objects": self.objects,
            "warm": self.warming,
            "groups": self.groups,
            "slow": self.slow,
            "requests": self.requests,
            "requests/{name:path}": self.explain,
            "events": self.events,
            "config": self.settings,
            "config/drift": self.drift,
            "doctor": self.doctor,
        }

    async def index(self, _request: Request) -> object:
        """What there is."""
        return {
            "get": [f"{PREFIX}/{name}".rstrip("/") for name in [*self.gets, "stream"]],
            "post": [f"{PREFIX}/actions/{{name}}"],
        }

    async def nodes(self, _request: Request) -> object:
        """The nodes of the page: this one. `kvferry ui` has several (several.py)."""
        return [{"name": socket.gethostname(), "base": "../"}]

    async def status(self, _request: Request) -> object:
        """The document of `kvferry status --json`."""
        return (await self._window.reading()).document

    async def sessions(self, _request: Request) -> object:
        """Engines, their halves and namespaces."""
        return (await self._window.reading()).document.sessions

    async def tiers(self, _request: Request) -> object:
        """Where bytes are kept: the host pool, and the slower tiers behind it."""
        reading = await self._window.reading()
        return {"host": reading.document.pool, "slower": reading.pipeline.tiers}

    async def paths(self, _request: Request) -> object:
        """Bytes per network card and RDMA port, and the pool's per NUMA node."""
        return await asyncio.to_thread(self._window.paths)

    async def curve(self, _request: Request) -> object:
        """Tokens wanted, and estimates of those that miss in a pool of another size."""
        return (await self._window.reading()).pipeline.journal.curve

    async def jobs(self, _request: Request) -> object:
        """Open jobs, oldest first."""
        return await self._window.ask(lambda desk, now_s: desk.jobs(now_s))

    async def leases(self, _request: Request) -> object:
        """Leases, least recently confirmed first."""
        return await self._window.ask(lambda desk, now_s: desk.leases(now_s))

    async def prefixes(self, request: Request) -> object:
        """Prefixes that hit most, of the requests that are remembered."""
        count = _number(request, "limit", 20, prefixes_listed_max)
        records = await self._window.ask(lambda desk, now_s: desk.records(now_s))
        now_s = time.monotonic()
        return [
            {
                **dataclasses.asdict(one),
                "key": one.key.hex(),
                "engine": "/".join(one.engine),
                "last_use_s": now_s - one.last_use_s,
            }
            for one in hottest(records, count)
        ]

    async def namespaces(self, _request: Request) -> object:
        """What every namespace has in the pool, and its bounds."""
        return await self._window.ask(lambda desk, _now_s: desk.namespaces())

    async def warming(self, _request: Request) -> object:
        """How `kvferry warm` goes."""
        return await self._window.ask(lambda desk, _now_s: desk.warming())

    async def objects(self, request: Request) -> object:
        """Objects of one page of the pool: go on with ``first=next`` until that is null.

        With ``tier=`` the name of a disk: of it; go on with ``after=next``.
        """
        most = _number(request, "limit", 100, objects_listed_max)
        if tier := request.query_params.get("tier"):
            return await self._on_disk(request, tier, most)
        first = _number(request, "first", 0, (1 << 31) - 1, least=0)
        wanted = _filter(request)
        return await self._window.ask(lambda desk, _now_s: desk.objects(wanted, first, most))

    async def _on_disk(self, request: Request, tier: str, most: int) -> object:
        text = request.query_params.get("after", "")
        if not _KEY.fullmatch(text):
            raise RequestError(f"after={text!r} is no key", "give the last page's next")
        wanted, after = _filter(request), bytes.fromhex(text)
        found = await self._window.ask_later(
            lambda desk, now_s: desk.on_disk(tier, after, most, now_s)
        )
        return disk_page(found, wanted, most, time.time())

    async def groups(self, request: Request) -> object:
        """The geometry of an engine, and which chunks a hit of ``tokens`` needs."""
        tokens = _number(request, "tokens", 4096, tokens_max)
        engine = request.query_params.get("engine", "")
        return await self._window.ask(lambda desk, _now_s: desk.groups(engine, tokens))

    async def slow(self, _request: Request) -> object:
        """The jobs that took longest, of the requests that are remembered."""
        records = await self._window.ask(lambda desk, now_s: desk.records(now_s))
        return await asyncio.to_thread(slowest, records, time.monotonic())

    async def requests(self, request: Request) -> object:
        """The newest requests that fit."""
        wanted, count = request.query_params, _number(request, "limit", 100, listed_max)
        unknown = sorted(set(wanted) - {*_FITS, "hit", "limit"})
        if unknown or wanted.get("hit", "0") not in ("0", "1"):
            told = f"requests: no {', '.join(unknown)}" if unknown else f"hit={wanted['hit']}"
            raise RequestError(told, f"give {', '.join(_FITS)}, hit=0 or hit=1, limit")
        records = await self._window.ask(lambda desk, now_s: desk.records(now_s))
        return listed(records, wanted, count)

    async def explain(self, request: Request) -> object:
        """All that is known of one request."""
        name = request.path_params["name"]
        records = await self._window.ask(lambda desk, now_s: desk.records(now_s))
        found = matching(records, name)
        if not found:
            started_s = (await self._window.reading()).started_s
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started_s))
            raise RequestError(
                f"no request {name!r} is remembered",
                f"this sidecar started at {at}, knows nothing of requests before that, and the "
                f"last {len(records)} since; one that vLLM never looked up is not known",
            )
        now_s = time.monotonic()
        return [verdicts.view(one, now_s, timeline=True) for one in found[-explained_max:]]

    async def events(self, _request: Request) -> object:
        """The last events of the log, oldest first."""
        return [] if self._window.desk is None else self._window.desk.events()

    async def settings(self, _request: Request) -> object:
        """Every setting, and where it came from."""
        rows = [] if self._window.desk is None else self._window.desk.settings()
        return [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]

    async def drift(self, _request: Request) -> object:
        """Where the settings in effect are not those on disk."""
        desk = self._window.desk
        if desk is None:
            raise UnavailableError("the sidecar is starting")
        return await asyncio.to_thread(desk.drift)

    async def doctor(self, _request: Request) -> object:
        """What `kvferry doctor` finds: of the machine, and of the engines that are attached."""
        found = list(await asyncio.to_thread(self._window.doctor))
        try:
            found += check_engines((await self._window.reading()).document)
        except UnavailableError as error:
            found.append(warn("engines", str(error), "see /livez and the sidecar's log"))
        return found

    async def act(self, request: Request) -> object:
        """Carry out one action."""
        body = await _body(request)
        name = request.path_params["name"]
        return await self._window.ask(lambda desk, now_s: desk.act(name, body, now_s))

    async def stream(self, _request: Request) -> Response:
        """The status and the events as they come."""
        if self._streams >= streams_max:
            raise UnavailableError(f"{streams_max} streams are open (streams_max)")
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._counted(), headers=headers, media_type="text/event-stream")

    async def _counted(self) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            async for piece in _changes(self._window):
                yield piece
        finally:
            self._streams -= 1

    async def bundle(self, _request: Request) -> Response:
        """Everything, for support."""
        body = await bundle.pack(self._window)
        name = f"kvferry-{time.strftime('%Y%m%dT%H%M%S')}.zip"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(body, media_type="application/zip", headers=headers)


def routes(window: Window) -> list[Route]:
    """Return the routes of the API."""
    api = Api(window)
    return [
        *(
            Route(f"{PREFIX}/{path}".rstrip("/"), _json(one), methods=["GET"])
            for path, one in api.gets.items()
        ),
        Route(f"{PREFIX}/stream", _told(api.stream), methods=["GET"]),
        Route(f"{PREFIX}/actions/{{name}}", _json(api.act), methods=["POST"]),
        Route("/debug/bundle", _told(api.bundle), methods=["GET"]),
    ]


def listed(records: tuple[Record, ...], wanted: Any, count: int) -> list[verdicts.RecordView]:
    """Return the newest records that fit ``wanted``: engine, reason, load, and hit=0 or 1."""
    now_s = time.monotonic()
    found: list[verdicts.RecordView] = []
    for record in reversed(records):
        if len(found) >= count:
            break
        one = verdicts.view(record, now_s, timeline=False)
        fits = all(name not in wanted or wanted[name] == getattr(one, name) for name in _FITS)
        if fits and ("hit" not in wanted or bool(one.hit_tokens) == (wanted["hit"] == "1")):
            found.append(one)
    return found


def slowest(records: tuple[Record, ...], now_s: float) -> list[dict[str, object]]:
    """Return the slowest jobs, longest first."""
    jobs = ((job, record) for record in records for job in list(record.jobs))
    longest = heapq.nlargest(slow_max, jobs, key=lambda one: one[0].ended_s - one[0].opened_s)
    return [
        {
            "engine": "/".join(record.engine),
            "request": record.request,
            "kind": job.kind,
            "status": job.status,
            "reason": str(job.reason),
            "moved_bytes": job.moved_bytes,
            "seconds": job.ended_s - job.opened_s,
            "age_s": now_s - job.ended_s,
            "trace_id": record.trace_id,
            **dict(zip(STAGES, job.stages, strict=True)),
        }
        for job, record in longest
    ]


def matching(records: tuple[Record, ...], name: str) -> list[Record]:
    """Return the admissions of a request: by its id, else by the beginning of it."""
    exact = [record for record in records if record.request == name]
    return exact or [record for record in records if record.request.startswith(name)]


async def _changes(window: Window) -> AsyncIterator[bytes]:
    """Yield the status once a second, and log events as they come."""
    told = len(window.desk.events()) if window.desk is not None else 0
    seen: object = None
    while True:
        try:
            reading = await window.reading()
            body = msgspec.json.encode(reading.document)
            yield b"event: status\ndata: " + body + b"\n\n"
        except UnavailableError as error:
            yield b"event: unavailable\ndata: " + msgspec.json.encode(str(error)) + b"\n\n"
        events = window.desk.events() if window.desk is not None else []
        fresh = _after(events, seen) if seen is not None else events[told:]
        for event in fresh:
            yield b"event: log\ndata: " + msgspec.json.encode(event, enc_hook=str) + b"\n\n"
        seen = events[-1] if events else seen
        await asyncio.sleep(stream_s)


def _after(events: Any, seen: object) -> Any:
    for number, event in enumerate(events):
        if event is seen:
            return events[number + 1 :]
    return events


def _number(request: Request, name: str, default: int, most: int, least: int = 1) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
        raise RequestError(
            f"{name}={text} is no number of {least} to {most}", f"give {least} to {most}"
        )
    return int(text)


def _filter(request: Request) -> Filter:
    given = {k: v for k, v in request.query_params.items() if k not in _PAGING}
    try:
        return msgspec.convert(given, Filter, strict=False)
    except msgspec.ValidationError as error:
        names = ", ".join(Filter.__struct_fields__)
        raise RequestError(f"objects: {error}", f"give {names}, {', '.join(_PAGING)}") from error


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "application/json").partition(";")[0]
    if kind != "application/json":
        raise RequestError(f"the body is {kind}", "send application/json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > body_bytes_max:
            raise RequestError(f"the body is over {body_bytes_max} bytes", "send less")
    return body


def _told(handler: Handler) -> Handler:
    """Turn what goes wrong into an answer."""

    async def told(request: Request) -> Any:
        try:
            return await handler(request)
        except UnavailableError as error:
            return fault("unavailable", str(error), "try again; see the sidecar's log", 503)
        except RequestError as error:
            status = 404 if request.method == "GET" and "name" in request.path_params else 400
            return fault("request", error.message, error.remedy, status)

    return told


def _json(handler: Handler) -> Handler:
    """Encode what a handler returns."""

    async def encoded(request: Request) -> Response:
        body = msgspec.json.encode(await handler(request), enc_hook=str)
        return Response(body, media_type="application/json")

    return _told(encoded)
