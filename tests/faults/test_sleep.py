"""An engine sleeps and wakes up: its memory is given back before, and lent under a new serial.

The hooks of vLLM 0.33 on the real worker half, called by hand over a real sidecar: over host
memory, and over a GPU made of host memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvferry_connector import export, worker_half
from kvferry_connector.config import read_config
from kvferry_connector.cuda import Driver
from kvferry_connector.jobs import JobOrder, Report
from kvferry_connector.link import HotSocket, Link, pack
from kvferry_connector.meta import FerryMetadata
from kvferry_connector.wire.attach import RegisterRank
from kvferry_connector.wire.codec import encode_job
from kvferry_connector.wire.hot import Error, Release, Submit
from kvferry_connector.worker_half import WorkerHalf
from msgspec.structs import replace
from support.books import read_status, wait_settled
from support.fake_cuda import FakeGpu, bytes_at, library
from support.hot_engine import HotEngine, Job
from support.kit import ENABLED, Kit
from support.parallel import parallel_config
from support.raw_half import KvMemory, RawHalf, engine_registration
from support.sidecar import SidecarUnderTest, running_sidecar
from support.waiting import wait_until

BLOCKS, AGAIN = (1, 2, 3), (4, 5, 6)
GPU = ("--set", "copy.gpu=true")


class Pages(KvMemory):
    """KV memory that the engine allocated, seen as bytes."""

    def __init__(self, view: Any) -> None:
        super().__init__(blocks=1024)
        self._pages.close()
        self._pages = view

    def close(self) -> None:
        self._pages = memoryview(bytearray())
        os.close(self.fence_fd)
        os.close(self.fd)
        self._fence.close()


class Sleeper:
    """An engine of one rank: the real worker half, and a scheduler half by hand."""

    def __init__(self, run_dir: Path, kind: str, patch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
        self._gpu, self._kind = gpu, kind
        config = SimpleNamespace(
            parallel_config=parallel_config(),
            kv_transfer_config=SimpleNamespace(engine_id="sleeper"),
            device_config=SimpleNamespace(device_type="cpu" if kind == "host" else "cuda"),
            instance_id="one",
        )
        patch.setattr(worker_half, "describe_rank", self._describe)
        patch.setattr(worker_half, "_current_stream", lambda *_: 0)
        patch.setattr(export, "Driver", lambda: Driver(str(library())))
        self.half = WorkerHalf(config, None, read_config({"run_dir": str(run_dir)}))
        self.memory, self.tensor = self._allocate()
        life = os.urandom(16)
        self.scheduler = RawHalf(run_dir, engine_id="sleeper", instance_id="one")
        self.scheduler.attach()
        self.scheduler.register(engine_registration([0], life))
        self.engine = HotEngine(self.scheduler, self.scheduler, self.memory, life)
        self.half.register({"all": self.tensor})
        self.prompt = os.urandom(8).hex()
        self._step = 0
        self.reports: dict[int, Report] = {}

    def _allocate(self) -> tuple[KvMemory, Any]:
        total_bytes = KvMemory(blocks=1).total_bytes * 1024
        if self._kind == "host":
            with self.half.memory_context():
                tensor = torch.zeros(total_bytes, dtype=torch.int8)
            return Pages(memoryview(tensor.numpy()).cast("B")), tensor
        assert self.half.memory_context() is None, "the engine's own pool, which sleep frees"
        how = {"kind": "virtual", "types": 1} if self._kind == "gpu-virtual" else {}
        address = self._gpu.alloc(total_bytes, **how)
        storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: total_bytes)
        device = SimpleNamespace(type="cuda", index=0)
        tensor = SimpleNamespace(untyped_storage=lambda: storage, device=device)
        return Pages(memoryview(bytes_at(address, total_bytes)).cast("B")), tensor

    def _describe(
        self, _config: Any, _kv: Any, caches: Any, memory: Any, _: Any, serial: int
    ) -> RegisterRank:
        buffer = memory.find(caches["all"]).buffer
        (place,) = self.memory.registration(0, 1).placements
        return self.memory.registration(
            0, 1, serial=serial, placements=[replace(place, buffer=buffer)]
        )

    @property
    def link(self) -> Link | None:
        return self.half._client.link()

    def ready(self, beyond: int = 0) -> Link:
        """Wait until the sidecar serves this engine under a later generation."""

        def found() -> Link | None:
            link = self.link
            return link if link is not None and link.ready and link.generation > beyond else None

        return wait_until(found, "the rank is ready")

    def step(
        self, loads: Sequence[Job] = (), saves: Sequence[Job] = (), *, done: bool = True
    ) -> None:
        """One step of the engine with these jobs, whose bytes are in place."""
        self._step += 1
        epoch = self.link.epoch if self.link else 1
        orders = [
            [
                JobOrder(one.job.job, one.job.request, epoch, encode_job(one.job), one.raw)
                for one in jobs
            ]
            for jobs in (loads, saves)
        ]
        self.half.bind(FerryMetadata(self._step, tuple(orders[0]), tuple(orders[1])))
        with pytest.MonkeyPatch.context() as patch:
            if not done:
                patch.setattr(self.half._fence, "done", lambda _step: None)
            self.half.end_forward()

    def save(self, prompt: str) -> Job:
        """Return a save of the next step."""
        return self.engine.save_job(prompt, BLOCKS, step=self._step + 1)

    def report(self, job: int) -> Report:
        """Wait for the rank's report of a job."""

        def found() -> Report | None:
            self.half.results()
            told = self.half.worker_metadata()
            self.reports |= {key: one for key, (one,) in (told.reports if told else {}).items()}
            return self.reports.get(job)

        return wait_until(found, f"job {job} is reported")

    def put(self, prompt: str) -> None:
        self.engine.fill(prompt, BLOCKS)
        job = self.save(prompt)
        self.step(saves=[job])
        assert self.report(job.job.job).status == "done"

    def get(self, prompt: str) -> int:
        """Load what hits, compare, and return how many tokens hit."""
        admission, answer = self.engine.lease(prompt, len(AGAIN))
        if answer.hit_tokens:
            self.engine.wipe(AGAIN)
            job = self.engine.load_job(admission, AGAIN, step=self._step + 1)
            self.step(loads=[job])
            assert self.report(job.job.job).status == "done"
            assert self.engine.holds(prompt, AGAIN)
        self.scheduler.send(Release([admission]))
        return answer.hit_tokens

    def remap(self) -> None:
        """On a GPU, sleep frees the pages and waking up maps other ones."""
        if self._kind != "host":
            self.memory.close()
            self._gpu.free_all()
            self.memory, self.tensor = self._allocate()
            self.half._kv_caches = {"all": self.tensor}
            self.engine.memory = self.memory

    def close(self) -> None:
        self.half.shutdown()
        self.scheduler.leave()
        self.memory.close()


@pytest.fixture(scope="module", params=["host", "gpu", "gpu-virtual"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def sidecar(kind: str) -> Iterator[SidecarUnderTest]:
    flags = (*ENABLED, *(GPU if kind != "host" else ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(library().parent))
        with running_sidecar(pool_bytes=16 << 20, flags=flags) as found:
            yield found


@pytest.fixture
def sleeper(
    sidecar: SidecarUnderTest, kind: str, monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu
) -> Iterator[Sleeper]:
    with closing(Sleeper(sidecar.run_dir, kind, monkeypatch, gpu)) as found:
        found.ready()
        yield found


def mappings(sidecar: SidecarUnderTest) -> int:
    """How many buffers of this process the sidecar has mapped: it tries copies in its own."""
    maps = Path(f"/proc/{sidecar.process.pid}/maps").read_text().splitlines()
    own = ("kvferry-kv", f"kvferry-fake-gpu-{os.getpid()}-")
    return sum(any(name in line for name in own) for line in maps)


def ranks(sidecar: SidecarUnderTest) -> list[int]:
    """The serials of the ranks that are registered."""
    sessions = read_status(sidecar.run_dir)["sessions"]
    return [half["serial"] for s in sessions for half in s["halves"] if half["role"] == "worker"]


def wait_lent(sidecar: SidecarUnderTest, serial: int) -> None:
    """Wait until one memory is mapped; where an attach was tried twice, it may be two first."""
    wait_until(
        lambda: (mappings(sidecar), ranks(sidecar)) == (1, [serial]), f"serial {serial} is mapped"
    )


def test_what_was_saved_before_the_sleep_is_loaded_after_it(
    sidecar: SidecarUnderTest, sleeper: Sleeper
) -> None:
    sleeper.put(sleeper.prompt)
    wait_lent(sidecar, serial=1)
    before = sleeper.ready()
    sleeper.half.unregister()
    assert (mappings(sidecar), ranks(sidecar)) == (0, []), "closed before the hook returns"
    assert sleeper.link is None
    sleeper.half.unregister()
    assert sleeper.get(sleeper.prompt) == 0, (
        "nothing is promised to an engine that could not take it"
    )
    late = sleeper.save("an order of before")
    sleeper.step(saves=[late])
    assert sleeper.report(late.job.job)[1:3] == ("failed", "unregistered")
    sleeper.remap()
    sleeper.half.restore()
    sleeper.half.restore()
    after = sleeper.ready(before.generation)
    wait_lent(sidecar, serial=2)
    assert after.epoch == before.epoch
    assert sleeper.get(sleeper.prompt) == 48
    wait_settled(sidecar.run_dir)


@pytest.mark.parametrize("waits_for", ["its fence", "its copy"])
def test_what_is_open_ends_before_the_memory_is_given_back(
    sidecar: SidecarUnderTest, sleeper: Sleeper, waits_for: str
) -> None:
    kit = Kit(sidecar.run_dir)
    before = sleeper.ready()
    job = sleeper.save(sleeper.prompt)
    if waits_for == "its copy":
        kit.rules("hold save")
        sleeper.step(saves=[job])
        kit.wait_met("hold save")
    else:
        sleeper.step(saves=[job], done=False)
        wait_until(
            lambda: read_status(sidecar.run_dir)["pipeline"]["queues"]["fence"], "the job waits"
        )
    sleeper.half.unregister()
    assert mappings(sidecar) == 0
    assert sleeper.report(job.job.job)[1:3] == ("failed", "unregistered")
    sleeper.remap()
    sleeper.half.restore()
    sleeper.ready(before.generation)
    assert sleeper.get(sleeper.prompt) == 0, "it was not saved"
    kit.rules()
    wait_settled(sidecar.run_dir)


def test_a_frame_of_an_older_serial_is_refused_by_name(
    sidecar: SidecarUnderTest, sleeper: Sleeper
) -> None:
    sleeper.put(sleeper.prompt)
    old = sleeper.ready()
    sleeper.half.unregister()
    sleeper.remap()
    sleeper.half.restore()
    new = sleeper.ready(old.generation)
    admission, answer = sleeper.engine.lease(sleeper.prompt, len(AGAIN))
    assert answer.hit_tokens == 48
    sleeper.engine.wipe(AGAIN)
    job = sleeper.engine.load_job(admission, AGAIN)
    assert new.hot is not None
    assert new.hot.send(pack(old, Submit(encode_job(job.job)), job.raw))
    counts: Any = sleeper.half._client.counts

    def refused() -> list[Error]:
        found = new.hot.receive(new, 1000, counts) if isinstance(new.hot, HotSocket) else []
        return [message for message, _ in found if isinstance(message, Error)]

    (error,) = wait_until(refused, "it is refused")
    assert error.code == "stale"
    assert f"generation {old.generation}" in error.message
    assert not sleeper.engine.holds(sleeper.prompt, AGAIN), "nothing was copied into the new memory"
    sleeper.scheduler.send(Release([admission]))
    assert sleeper.get(sleeper.prompt) == 48


def test_a_sidecar_that_does_not_answer_gets_nothing_new_before_it_does(
    sidecar: SidecarUnderTest, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_half, "_withdraw_s_max", 0.2)
    sleeper.put(sleeper.prompt)
    before = sleeper.ready()
    os.kill(sidecar.process.pid, signal.SIGSTOP)
    try:
        sleeper.half.unregister()
        assert sleeper.half.stats.data["withdraw_s_max"] == 1
        sleeper.half.restore()
        assert sleeper.link is None
    finally:
        os.kill(sidecar.process.pid, signal.SIGCONT)
    assert sleeper.ready(before.generation).epoch == before.epoch
    wait_lent(sidecar, serial=2)
    assert sleeper.get(sleeper.prompt) == 48


def test_a_sidecar_that_dies_meanwhile_has_nothing_to_give_back(
    sidecar: SidecarUnderTest, sleeper: Sleeper
) -> None:
    sleeper.put(sleeper.prompt)
    sleeper.half.unregister()
    sidecar.kill(signal.SIGKILL)
    sidecar.restart()
    sleeper.half.unregister()
    assert ranks(sidecar) == []
    sleeper.remap()
    sleeper.half.restore()
    scheduler = sleeper.scheduler
    scheduler.stream.close()
    scheduler.stream = type(scheduler.stream)(sidecar.run_dir)
    scheduler.attach()
    scheduler.register(engine_registration([0], sleeper.engine.life))
    sleeper.ready()
    assert sleeper.get(sleeper.prompt) == 48
