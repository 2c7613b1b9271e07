"""What follows from the state of a session: who is in it, and whether it is complete."""

from __future__ import annotations

from kvferry_sidecar.sessions.model import Peer, RankGeometry, Session
from kvferry_sidecar.sessions.rules import rules_of, save_rule_of
from kvferry_sidecar.sessions.tenants import Credentials


def half_of(session: Session, rank: int) -> Peer | None:
    """Return the scheduler half (rank below 0) or the worker half of a rank."""
    return session.scheduler if rank < 0 else session.workers.get(rank)


def halves(session: Session) -> list[Peer]:
    """Return all halves, the scheduler half first."""
    workers = [session.workers[rank] for rank in sorted(session.workers)]
    return workers if session.scheduler is None else [session.scheduler, *workers]


def of_user(session: Session, who: Credentials) -> bool:
    """Whether all halves there are run as this user and group."""
    return all(half.who == who for half in halves(session))


def complete(session: Session) -> list[RankGeometry] | None:
    """Return the geometries in rank order once the scheduler half and all its ranks registered."""
    if not session.life or not session.ranks:
        return None
    found = [session.workers[rank].geometry for rank in session.ranks if rank in session.workers]
    geometries = [geometry for geometry in found if geometry is not None]
    return geometries if len(geometries) == len(session.ranks) else None


def namespace_hex(session: Session) -> str:
    """Return the digest in hex; empty until all ranks are known."""
    return session.namespaces.get(session.version, b"").hex() if session.ready else ""


def save_rules(session: Session, peer: Peer | None = None) -> list[str]:
    """Return the rules per group, of one rank or of the first that registered.

    Until the scheduler half registered, a sliding window's is the wider one.
    """
    for half in [peer] if peer is not None else halves(session):
        if half.geometry is not None:
            if not session.life:
                return [group.save_rule for group in half.geometry.groups]
            rules = rules_of(session, half.geometry)
            return [save_rule_of(rules, group) for group in half.geometry.groups]
    return []


def identity_of(session: Session) -> dict[str, str]:
    """Return the identity facts of the session's ranks, empty while none registered."""
    for half in halves(session):
        if half.geometry is not None:
            return half.geometry.identity
    return {}
