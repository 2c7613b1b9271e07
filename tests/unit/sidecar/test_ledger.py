"""accepted = done + failed + cancelled + open; the reasons are a complete, documented list."""

from __future__ import annotations

from kvferry_connector.wire.hot import JobStatusName
from kvferry_sidecar.outcomes.ledger import Ledger, PartKey
from kvferry_sidecar.outcomes.reasons import EXPLANATIONS, Reason

DONE, FAILED = JobStatusName.DONE, JobStatusName.FAILED
A, B = ("a", "i"), ("b", "i")


def test_sums_per_session_and_in_all():
    ledger = Ledger(8)
    for job, session in ((1, A), (2, A), (3, B)):
        ledger.accept(session, PartKey(1, job), "load" if job == 1 else "save")
    ledger.end(PartKey(1, 1), DONE, Reason.NONE, 10, 0.5)
    ledger.end(PartKey(1, 3), FAILED, Reason.FENCE, 0, 1.0)
    ledger.refuse(B, Reason.TABLES)
    total = ledger.totals()
    assert (total.accepted, total.done, total.failed, total.open) == (3, 1, 1, 1)
    assert (total.loaded_bytes, total.saved_bytes, total.seconds) == (10, 0, 1.5)
    assert total.reasons == {"done": 1, "failed/fence": 1, "refused/tables": 1}
    assert ledger.sessions()["a/i"].open == 1
    assert ledger.sessions()["b/i"].refused == 1
    assert ledger.integrity([PartKey(1, 2)]) == []


def test_integrity_names_what_is_wrong():
    ledger = Ledger(8)
    ledger.accept(A, PartKey(1, 1), "load")
    assert ledger.integrity([]) == ["open in the ledger: 1, really open: 0"]
    ledger.accept(A, PartKey(1, 1), "load")
    ledger.end(PartKey(1, 1), DONE, Reason.NONE, 0, 0.0)
    ledger.end(PartKey(1, 1), DONE, Reason.NONE, 0, 0.0)
    assert len(ledger.integrity([])) == 2


def test_an_idle_account_is_audited_once_after_each_change(monkeypatch):
    ledger, looked = Ledger(8), []
    monkeypatch.setattr(ledger, "integrity", lambda running: looked.append(running) or ["wrong"])
    assert ledger.audit() == []
    for change in (
        lambda: ledger.accept(A, PartKey(1, 1), "save"),
        lambda: ledger.end(PartKey(1, 1), DONE, Reason.NONE, 1, 0.0),
        lambda: ledger.end(PartKey(1, 1), DONE, Reason.NONE, 1, 0.0),  # a fault
    ):
        change()
        assert [ledger.audit() for _ in range(3)] == [["wrong"], [], []]
    assert looked == [()] * 3


def test_old_sessions_are_folded_and_the_sum_stays():
    ledger = Ledger(2)
    for number in range(10):
        key = PartKey(number, 1)
        ledger.accept((str(number), "i"), key, "save")
        ledger.end(key, DONE, Reason.NONE, 1, 0.0)
    assert len(ledger.sessions()) == 2
    assert ledger.totals().done == 10
    assert ledger.integrity([]) == []


def test_every_reason_is_explained_and_distinct():
    assert set(EXPLANATIONS) == set(Reason)
    meanings = [explanation.meaning for explanation in EXPLANATIONS.values()]
    assert len(set(meanings)) == len(meanings)
    assert all(e.meaning and e.remedy for e in EXPLANATIONS.values())


def test_sizes_and_times_are_counted():
    ledger = Ledger(8)
    for job in range(5):
        ledger.accept(A, PartKey(1, job), "load")
        ledger.end(PartKey(1, job), DONE, Reason.NONE, 1 << 20, 0.5, stages=(0.0, 0.1, 0.4))
    moved, stages = ledger.part_bytes(), ledger.stage_seconds()
    assert (moved["load"].count, moved["load"].sum, moved["save"].count) == (5, 5 << 20, 0)
    assert stages["load/copy"].count == 5
    assert stages["load/copy"].quantile(0.5) == 1.0
    assert stages["save/copy"].count == 0
