"""How the numbers of metrics are read from a Reading; table.py says which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvferry_sidecar.doctor.finding import Verdict
from kvferry_sidecar.observe.reading import Reading
from kvferry_sidecar.outcomes.histogram import HistogramReading

Labels = tuple[str, ...]
Numbers = Iterable[tuple[Labels, float]]
Readings = Iterable[tuple[Labels, HistogramReading]]


def one(read: Callable[[Reading], float]) -> Callable[[Reading], Numbers]:
    """A number without labels."""
    return lambda reading: [((), read(reading))]


def by(read: Callable[[Reading], Mapping[str, float]]) -> Callable[[Reading], Numbers]:
    """Numbers by one label."""
    return lambda reading: [((name,), number) for name, number in read(reading).items()]


def split(read: Callable[[Reading], Mapping[str, float]]) -> Callable[[Reading], Numbers]:
    """Numbers by labels that are joined by slashes."""
    return lambda reading: [(tuple(k.split("/")), n) for k, n in read(reading).items()]


def sessions(reading: Reading) -> dict[str, float]:
    """Engines by state."""
    ready = sum(session.ready for session in reading.document.sessions)
    return {"ready": ready, "incomplete": len(reading.document.sessions) - ready}


def ranks(reading: Reading) -> dict[str, float]:
    """Ranks of all engines by state."""
    states = dict.fromkeys(("registered", "attached", "disconnected", "missing"), 0.0)
    for session in reading.document.sessions:
        workers = [half for half in session.halves if half.rank >= 0]
        states["missing"] += len(set(session.ranks) - {half.rank for half in workers})
        for half in workers:
            state = "registered" if half.registered else "attached"
            states[state if half.connected else "disconnected"] += 1
    return states


def objects(reading: Reading) -> dict[str, float]:
    """Objects of the host pool by state."""
    pool = reading.document.pool
    if pool is None:
        return {}
    return {"ready": pool.ready, "writing": pool.writing, "doomed": pool.doomed}


def pinned(reading: Reading) -> dict[str, float]:
    """Objects that are pinned, by how."""
    pool = reading.document.pool
    return {} if pool is None else {"soft": pool.pinned_soft, "hard": pool.pinned_hard}


def pool(field: str) -> Callable[[Reading], Numbers]:
    """One field of the host pool."""

    def read(reading: Reading) -> Numbers:
        pool = reading.document.pool
        return [] if pool is None else [(("host",), getattr(pool, field))]

    return read


def requests(reading: Reading) -> dict[str, float]:
    """Requests by first answer."""
    pipeline = reading.pipeline
    return {
        "hit": pipeline.hit_requests,
        "miss": pipeline.missed_requests,
        "local": pipeline.local_requests,
    }


def moved(reading: Reading) -> dict[str, float]:
    """Bytes copied by direction."""
    ledger = reading.pipeline.ledger
    return {"load": ledger.loaded_bytes, "save": ledger.saved_bytes}


def shadow_steps(reading: Reading) -> dict[str, float]:
    """Hits that were computed and compared, by how far they came."""
    shadow = reading.pipeline.shadow
    if shadow is None:
        return {}
    names = ("watched", "compared", "differed", "dropped")
    return {name: getattr(shadow, name) for name in names}


def refused(reading: Reading) -> dict[str, float]:
    """Refused parts by reason."""
    found = reading.pipeline.ledger.reasons.items()
    return {name.removeprefix("refused/"): n for name, n in found if name.startswith("refused/")}


def limits(reading: Reading) -> dict[str, float]:
    """Bounds that were hit: those that are reasons, and those that have a counter of their own."""
    pipeline, loop = reading.pipeline, reading.loop
    hits: dict[str, float] = {
        name.replace("-", "_"): count
        for name, count in {**pipeline.declines, **refused(reading)}.items()
        if name.endswith("-max")
    }
    for name in ("connections-max", "sessions-max", "ranks-max", "tenant-share"):
        hits[name.replace("-", "_")] = loop.attach_refused.get(name, 0)
    for name in ("hello_ms_max", "attach_out_bytes_max"):
        hits[name] = loop.attach_refused.get(name, 0)
    return hits | {
        "admissions_dropped": pipeline.admissions_dropped,
        "tombstones_max": pipeline.tombstone_collapses,
        "records_max": pipeline.journal.records_dropped,
        "router_hwm": loop.frames_refused.get("send_full", 0),
    }


def curve_misses(reading: Reading) -> dict[str, float]:
    """Estimated misses by the pool's size, as a multiple of this one."""
    curve = reading.pipeline.journal.curve
    names = [f"{size:g}" for size in curve.sizes]
    return dict(zip(names, curve.missed_tokens, strict=True))


def state(reading: Reading) -> dict[str, float]:
    """1 for the state it is in."""
    return {name: reading.document.state == name for name in ("ready", "degraded", "draining")}


def nic_bytes(reading: Reading) -> Numbers:
    """Bytes by card and direction; of a bounded number of cards."""
    for nic in reading.paths.nics if reading.paths is not None else ():
        yield (nic.name, "received"), nic.received_bytes
        yield (nic.name, "sent"), nic.sent_bytes


def gpus(reading: Reading) -> Numbers:
    """Memory of each GPU that is used."""
    return [
        ((gpu.device, what), getattr(gpu, f"{what}_bytes"))
        for gpu in reading.document.gpus
        for what in ("total", "free", "staging", "mapped")
    ]


def tier_events(reading: Reading) -> Numbers:
    """What happened at slower tiers."""
    return [
        ((tier.name, event), count)
        for tier in reading.pipeline.tiers
        for event, count in tier.counts.items()
    ]


def tier_states(reading: Reading) -> Numbers:
    """The states of slower tiers."""
    return [((tier.name, tier.state), 1) for tier in reading.pipeline.tiers]


def tier_transports(reading: Reading) -> Numbers:
    """What slower tiers reach their servers by."""
    return [
        ((tier.name, str(tier.facts["transport"])), 1)
        for tier in reading.pipeline.tiers
        if "transport" in tier.facts
    ]


def tier_calls(reading: Reading) -> Numbers:
    """Calls into slower tiers."""
    return [
        ((tier.name, state), count)
        for tier in reading.pipeline.tiers
        for state, count in (("open", tier.calls_open), ("late", tier.calls_late))
    ]


def findings(reading: Reading) -> dict[str, float]:
    """Lines of the doctor's report by verdict."""
    found = [one.verdict for one in reading.findings]
    return {str(verdict): found.count(verdict) for verdict in Verdict}


def named(readings: Mapping[str, HistogramReading]) -> Readings:
    """Histograms by labels that are joined by slashes."""
    return [(tuple(name.split("/")), one) for name, one in readings.items()]


def whole(read: Callable[[Reading], HistogramReading | None]) -> Callable[[Reading], Readings]:
    """A histogram without labels."""
    return lambda reading: [((), found)] if (found := read(reading)) is not None else []
