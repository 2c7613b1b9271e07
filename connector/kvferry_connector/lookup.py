"""The scheduler half's talk with the sidecar: probes, asks, answers, leases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from kvferry_connector.client import Client
from kvferry_connector.config import FerryConfig
from kvferry_connector.half import Half
from kvferry_connector.link import Link
from kvferry_connector.meta import Beat, FerryWorkerMetadata
from kvferry_connector.nodes import HERE, Nodes
from kvferry_connector.requests import Admission, EngineRequest, Limits, Phase, Send, Tracked
from kvferry_connector.wire import hot
from kvferry_connector.wire.attach import RegisterEngine
from kvferry_connector.wire.codec import ids_max

MakeClient = Callable[[FerryConfig, Half, RegisterEngine], Client]
Count = Callable[..., None]


class Lookup:
    """Answers "how much of this request do you have?" within its time, for all admissions.

    ``count(name, number=1)`` takes the events. Waits at most ``lookup_wait_us_max`` per step, and
    ``idle_wait_us_max`` for the only request of an engine: there the alternative is an empty step.
    """

    def __init__(self, config: FerryConfig, engine: RegisterEngine, count: Count) -> None:
        self._config = config
        self._hash_tokens = engine.hash_block_tokens
        self._align, self._drafted = engine.alignment_tokens, engine.use_eagle
        self._count = count
        self._limits = Limits(config.probe_ms_max / 1000, config.hint_fresh_ms / 1000)
        self._patient = Limits(math.inf, self._limits.hint_fresh_s)
        self._open: dict[int, Tracked] = {}  # admissions the sidecar may talk about
        self._live: set[int] = set()
        self.beat: Beat = ((0, ()), 0)  # what heartbeats say
        self._releases: list[int] = []
        self._asks = 0
        self._waited = False
        self.stirred = False  # whether end_step has something to do
        self.client: Client | None = None
        self.nodes: Nodes | None = None  # the further ones, if there are any
        self.hear_event: Callable[[hot.Stored | hot.Removed], None] = lambda _: None

    def link(self) -> Link | None:
        """Return the link when the sidecar may be asked (on every node): ready and not silent."""
        client = self.client
        if client is None:
            return None
        link = client.link()
        if link is None or not link.ready or client.silent():
            return None
        return link if self.nodes is None or self.nodes.ready(link.save_rules) else None

    def begin(self, tracked: Tracked) -> None:
        """Watch a new admission."""
        self._open[tracked.admission.number] = tracked

    def look_ahead(self, tracked: Tracked) -> None:
        """Send the hashes of a new request before it is asked for, if the sidecar is there."""
        link = self.link()
        request = tracked.request
        if link is not None and self._cap(request) > 0 and not request.skip_reading_prefix_cache:
            self._probe(tracked, link)

    def ask(
        self, tracked: Tracked, local_tokens: int, *, alone: bool = False
    ) -> tuple[int | None, Link | None]:
        """Return the tokens to load beyond ``local_tokens``, or None for "ask me later"."""
        link = self.link()
        admission = tracked.admission
        if link is None or admission.phase >= Phase.LOADING:
            return 0, link
        self._receive(link, 0)
        cap, epoch, limits = self._cap(tracked.request), link.epoch, self._limits
        if self.nodes is not None and self.nodes.early(admission.number):
            limits = self._patient
        if admission.bound_tokens is not None:
            cap = min(cap, admission.bound_tokens // self._align * self._align)
        decision = admission.ask(time.monotonic(), local_tokens, cap, epoch, limits)
        if isinstance(decision, Send):
            if decision.probe and not self._probe(tracked, link):
                return 0, link
            if not self._send_ask(admission, link, local_tokens, cap, alone=alone):
                return 0, link
            decision = admission.ask(time.monotonic(), local_tokens, cap, epoch, limits)
            if isinstance(decision, Send):
                return None, link  # NeedFull: the full list goes out at the next ask
        if admission.phase is Phase.NONE:  # its time was over
            self._count("probe_ms_max")
            self.settle(admission)
        return decision, link

    def settle(self, admission: Admission, heir: Admission | None = None) -> None:
        """Nothing is open about this admission any more: the sidecar may forget it.

        With an ``heir``, the request's next one, it may once that has probed or is settled itself.
        A request that runs without a lease is not settled before it ends: by its keys the sidecar
        knows which stored prefix is in use, and keeps its head as long as what is saved behind it.
        """
        self._take_former(admission)
        if self._open.pop(admission.number, None) is not None and admission.epoch:
            if heir is not None and heir.version == admission.version:
                heir.former = admission
            else:
                self._release(admission.number)
        if self.nodes is not None:
            self.nodes.forget(admission.number)
        self.unlease(admission)

    def _take_former(self, admission: Admission) -> Admission | None:
        """Return what a probe may leave out, once: after a gap everything is sent."""
        former, admission.former = admission.former, None
        if former is not None:
            self._release(former.number)
        return former

    def _release(self, admission: int) -> None:
        self._releases.append(admission)  # goes out as the step ends, behind its probes
        self.stirred = True

    def unlease(self, admission: Admission) -> None:
        """Its lease, if there was one, has ended with its load."""
        if admission.number in self._live:
            self._live.discard(admission.number)
            self.stirred = True

    def end_step(self) -> None:
        """Once per step: state the live leases (for heartbeats) and release the others."""
        releases, self._releases = self._releases, []
        self._waited = self.stirred = False
        client = self.client
        if client is None:
            return
        self.beat = ((self._asks, tuple(sorted(self._live))), self.beat[1])
        client.set_live(*self.beat[0])
        client.tell(self._count)
        link = client.link() if releases else None
        for first in range(0, len(releases), ids_max):
            release = hot.Release(releases[first : first + ids_max])
            if link is not None:
                client.send(link, release)
            if self.nodes is not None:
                self.nodes.relay(release)

    def tell_pace(self, token_ns: int) -> None:
        """Have heartbeats say what a token of prefill costs."""
        self.beat = (self.beat[0], token_ns)
        if self.client is not None:
            self.client.set_pace(token_ns)

    def cancel(self, job: int) -> None:
        """Ask for a job's early end; its outcome comes to the ranks as ever."""
        link = self.client.link() if self.client is not None else None
        if self.client is not None and link is not None:
            self.client.send(link, hot.Cancel(job))
        if self.nodes is not None:
            self.nodes.relay(hot.Cancel(job))

    def _cap(self, request: EngineRequest) -> int:
        """Return the longest hit allowed: an aligned boundary strictly below its length."""
        tokens = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_tokens)
        return tokens // self._align * self._align

    def _send(self, link: Link, message: hot.FromHalf, raw: tuple[bytes, ...] = ()) -> bool:
        """Send to the sidecars of all nodes: a question that one of them lacks is not asked."""
        if self.client is not None and self.client.send(link, message, raw):
            return self.nodes is None or self.nodes.relay(message, raw)
        self._count("sends_refused")
        return False

    def _probe(self, tracked: Tracked, link: Link) -> bool:
        """Send the hashes of the request: only those behind what its former admission sent."""
        request, admission = tracked.request, tracked.admission
        hashes, former = request.block_hashes, self._take_former(admission)
        start = former.hashes if former is not None and former.epoch == link.epoch else 0
        start = start if start <= len(hashes) else 0  # streamed input may have cut them
        message = hot.Probe(
            request=request.request_id, admission=admission.number, version=admission.version,
            start=start, total=len(hashes), num_tokens=request.num_tokens,
            predecessor=hashes[start - 1] if start else b"", hash_bytes=len(hashes[0]),
            trace=(request.trace_headers or {}).get("traceparent", ""),
            former=0 if former is None else former.number,
        )  # fmt: skip
        if not self._send(link, message, (b"".join(hashes[start:]),)):
            return False
        admission.probed(link.epoch, len(hashes))
        return True

    def _send_ask(
        self, admission: Admission, link: Link, local: int, cap: int, *, alone: bool = False
    ) -> bool:
        """Send an Ask, and wait for its answer if nothing was waited for in this step yet.

        An answer of further nodes is never there in the same step.
        """
        if not self._send(link, hot.Ask(admission.number, self._asks + 1, local, cap)):
            return False
        self._asks += 1
        anew = admission.first_ask_s is None
        admission.asked(time.monotonic(), self._asks, local)
        self._mark(admission)
        if self.nodes is not None:
            self.nodes.asked(admission.number, self._asks, anew=anew)
            self.stirred = True
            return True
        wait_us = self._config.idle_wait_us_max if alone else self._config.lookup_wait_us_max
        deadline = time.perf_counter() + (0 if self._waited else wait_us * 1e-6)
        self._waited = self.stirred = True
        while admission.phase is Phase.ASKING:
            left_us = max(0, int((deadline - time.perf_counter()) * 1e6))
            if not self._receive(link, left_us) or left_us == 0:
                break
        return True

    def hear_nodes(self, meta: FerryWorkerMetadata) -> None:
        """Take what deputies learned. A sidecar that is another one knows no admission."""
        nodes = self.nodes
        if nodes is None:
            return
        others = [rank for rank, state in meta.nodes.items() if nodes.note(rank, state)]
        if others:
            for tracked in self._open.values():
                if tracked.admission.phase < Phase.LOADING:
                    tracked.admission.void()
                    self._mark(tracked.admission)
        link, now_s = self.link(), time.monotonic()
        for rank, epoch, message in meta.heard:
            if link is not None and nodes.is_current(rank, epoch):
                self._take(link, message, now_s, rank)

    def poll(self) -> None:
        """Take what the sidecar said meanwhile, without an ask."""
        link = self.link()
        if link is not None:
            self._receive(link, 0)

    def _receive(self, link: Link, wait_us: int) -> bool:
        """Take what the sidecar said; whether it said anything."""
        assert self.client is not None
        messages = self.client.receive(link, wait_us)
        now_s = time.monotonic()
        for message, _ in messages:
            if isinstance(message, hot.Stored | hot.Removed):
                self.hear_event(message)
                continue
            self._take(link, message, now_s, HERE)
        return bool(messages)

    def _take(self, link: Link, message: hot.FromSidecar, now_s: float, node: int) -> None:
        """Take what a node's sidecar said of an admission that it knows."""
        number = getattr(message, "admission", 0)  # outcomes and job states have none
        tracked = self._open.get(number)
        if tracked is None or tracked.admission.epoch != link.epoch:
            return
        if isinstance(message, hot.Answer) and self.nodes is not None:
            self._agree(tracked.admission, message, link, node)
        else:
            self._hear(tracked.admission, message, now_s, node)
        self._mark(tracked.admission)

    def _agree(self, admission: Admission, answer: hot.Answer, link: Link, node: int) -> None:
        """Take one node's answer: with the last, the hit that all gave, or a shorter question.

        What fits one node's groups at its own length need not fit at another's: all are asked again
        with the shortest as bound, until they agree. A drafter's only group drops a block below
        its bound (vLLM looks past it where there are several): the bound is one further for it.
        """
        assert self.nodes is not None
        hit = answer.hit_tokens // self._align * self._align
        gathered = self.nodes.answered(admission.number, node, answer, hit)
        if gathered is None or admission.phase is not Phase.ASKING:
            return
        (hits, sources), local = gathered, admission.local_tokens
        if min(hits) > local and min(hits) < max(hits):
            dropped = self._align if self._drafted and len(link.save_rules) == 1 else 0
            self._send_ask(admission, link, local, min(hits) + dropped)
            return
        if max(hits) > local >= min(hits):  # what some leased is of no use
            self._asks += 1
            self._send(link, hot.Ask(admission.number, self._asks, local, local))
        self._answered(admission, admission.seq, min(hits), sources)

    def _answered(
        self, admission: Admission, seq: int, hit: int, sources: Mapping[str, int]
    ) -> None:
        if admission.answered(time.monotonic(), seq, hit, sources):
            self._count("answers_hit" if admission.leased else "answers_miss")

    def _hear(
        self, admission: Admission, message: hot.FromSidecar, now_s: float, node: int
    ) -> None:
        if isinstance(message, hot.NeedFull):
            admission.void()
        elif isinstance(message, hot.Hint):
            least = stored = message.hit_tokens
            if self.nodes is not None:
                least, stored = self.nodes.hinted(admission.number, node, least)
            admission.hinted(now_s, least, stored)
            if self.nodes is None and admission.missed(now_s):
                self._count("answers_miss")
        elif isinstance(message, hot.Answer):
            hit = message.hit_tokens // self._align * self._align
            self._answered(admission, message.seq, hit, message.sources)
        elif isinstance(message, hot.Error):
            self._count("answers_refused")  # nothing better will come: a miss, and at once
            admission.answered(now_s, admission.seq, 0, {})

    def _mark(self, admission: Admission) -> None:
        if admission.leased == (admission.number in self._live):
            return
        self.stirred = True
        if admission.leased:
            self._live.add(admission.number)
        else:
            self._live.discard(admission.number)
