"""What the registry tells the pipeline, and asks it."""

from __future__ import annotations

from typing import Protocol

from kvferry_connector.wire.attach import Heartbeat

from kvferry_sidecar.sessions.model import Peer, Session


class SessionEvents(Protocol):
    """What the registry tells the pipeline."""

    def on_session_ready(self, session: Session, now_s: float) -> None:
        """All local ranks are registered, or one of them again with other memory."""

    def on_peer_dead(self, peer: Peer, now_s: float) -> None:
        """The half's process has ended, proven; it is still in its session during this call."""

    def on_bye(self, peer: Peer, now_s: float) -> None:
        """The half left in order; it is still in its session during this call."""

    def on_beat(self, peer: Peer, beat: Heartbeat, now_s: float) -> None:
        """A heartbeat with the half's live leases."""

    def on_version(self, session: Session, now_s: float) -> None:
        """The namespace version changed."""

    def busy(self, session: Session) -> bool:
        """Whether copies of the session still run: its mappings must stay."""
