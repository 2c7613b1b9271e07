"""A pod without Kubernetes: the containers of a rendered pod in namespaces of their own.

What a kubelet and a runtime do, as far as kvferry can tell the difference:

* one process, here ``sleep``, holds the pod's IPC namespace, and its PID namespace where the pod
  shares one; else every container has its own, or with hostPID the machine's;
* every container has a mount namespace and a root of its own. It sees its image (here: the parts
  of this machine that the test names, read-only), its volumes, /proc and a small /dev, no more;
* volumes are directories of mode 2777 with the pod's fsGroup, memory ones a tmpfs of their limit,
  those of huge pages a hugetlbfs; a hostPath is a directory of the node, which is a folder of the
  test;
* the process runs as its uid with the capabilities it was given, the root read-only where that is
  asked;
* an init container ends before the next one starts; a sidecar has started when its startup probe
  passes; at the end containers get SIGTERM, and sidecars only when those are gone.

Needs root. The mounts are in the pod's own namespaces: they vanish with its last process.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.chart import containers, mounts, volumes
from support.http import Http
from support.quantities import mebibytes
from support.waiting import wait_until

START_S = 180.0
Spec = Mapping[str, Any]
# container name: (path of this machine, path in the container)
Images = Mapping[str, Sequence[tuple[str, str]]]

# Makes a root and becomes the command after "--" in it. Before that: the root, "yes" or "no" for
# a read-only one, the uid, capabilities to keep (",+chown"), and binds: "ro|rw SOURCE TARGET".
_ENTER = """
root=$1; shift; readonly_root=$1; shift; user=$1; shift; added=$1; shift
mount -t tmpfs -o mode=0755 root "$root"
while [ "$1" != -- ]; do
  how=$1 source=$2 target=$root$3; shift 3
  if [ -d "$source" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; touch "$target"; fi
  mount --bind "$source" "$target"
  [ "$how" = rw ] || mount -o remount,bind,ro "$target"
done
shift
for name in bin sbin lib lib32 lib64; do
  if [ -L "/$name" ]; then cp -P "/$name" "$root/"; fi
done
mkdir -p "$root/proc" "$root/tmp" "$root/dev"
mount -t proc proc "$root/proc"
for name in null zero full random urandom; do
  touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
[ "$readonly_root" = no ] || mount -o remount,ro "$root"
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --groups "$user" --no-new-privs \\
  --inh-caps=-all --bounding-set="-all$added" "$@"
"""


def refusal() -> str:
    """Return "" where such namespaces can be made, else what the machine says."""
    script = "mount -t tmpfs probe /mnt && mount -t proc proc /proc"
    unshare = ["unshare", "--mount", "--ipc", "--pid", "--fork", "bash", "-c", script]
    done = subprocess.run(unshare, capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else f"no namespaces for a pod: {done.stderr.strip()}"


class Pod:
    """One pod on a ``node``, the folder its hostPaths lie in.

    ``images`` says per container name which paths of this machine are its image.
    """

    def __init__(self, spec: Spec, folder: Path, images: Images, node: Path) -> None:
        self.spec = spec
        self.node = node
        self.folder = folder
        self._images = images
        self._roots = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.user = int(spec["securityContext"]["runAsUser"])
        for name, volume in volumes(spec).items():
            make = volume.get("hostPath", {}).get("type", "DirectoryOrCreate")
            if make == "DirectoryOrCreate":
                self.volume(name).mkdir(parents=True, exist_ok="hostPath" in volume)
        self._pause = self._make_sandbox()

    def volume(self, name: str) -> Path:
        """Return the directory of a volume, as the pod's own mount namespace sees it."""
        source = volumes(self.spec)[name].get("hostPath")
        if source is not None:
            return self.node / source["path"].lstrip("/")
        return self.folder / "volumes" / name

    def _make_sandbox(self) -> subprocess.Popen[bytes]:
        lines = []
        for name, volume in volumes(self.spec).items():
            source = volume.get("emptyDir", {})
            where = shlex.quote(str(self.volume(name)))
            if source.get("medium") == "Memory":
                size = f"{int(mebibytes(source['sizeLimit']))}m"
                lines.append(f"mount -t tmpfs -o size={size} {shlex.quote(name)} {where}")
            elif source.get("medium", "").startswith("HugePages-"):
                page = source["medium"].removeprefix("HugePages-").removesuffix("i")
                lines.append(f"mount -t hugetlbfs -o pagesize={page} {shlex.quote(name)} {where}")
            if "emptyDir" in volume:
                group = self.spec["securityContext"]["fsGroup"]
                lines.append(f"chown 0:{group} {where}; chmod 2777 {where}")
        ready = self.folder / "ready"
        lines += [f"touch {shlex.quote(str(ready))}", "exec sleep infinity"]
        shared = ["--pid"] if self.spec.get("shareProcessNamespace") else []
        unshare = ["unshare", "--mount", "--ipc", *shared, "--fork", "--kill-child"]
        # If the test is killed, so is PID 1, and with it everything in the pod.
        command = ["setpriv", "--pdeathsig", "KILL", *unshare, "bash", "-euc", "\n".join(lines)]
        pause = subprocess.Popen(command)
        wait_until(ready.exists, "the pod's sandbox is there", START_S)
        return pause

    def command(
        self, name: str, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command that runs ``words`` as the container ``name``."""
        one = next(each for each in containers(self.spec) if each["name"] == name)
        self._roots += 1
        root = self.folder / f"root-{self._roots}"
        root.mkdir()
        readonly = {each["mountPath"] for each in one["volumeMounts"] if each.get("readOnly")}
        parts = [(target, source, "ro") for source, target in self._images[name]]
        for path, volume in mounts(one).items():
            parts.append((path, str(self.volume(volume)), "ro" if path in readonly else "rw"))
        # Parents before what lies inside them.
        binds = [word for target, source, how in sorted(parts) for word in (how, source, target)]
        sealed = "yes" if one["securityContext"]["readOnlyRootFilesystem"] else "no"
        clean = environment_of(one, environment or {})
        user = str(one["securityContext"].get("runAsUser", self.user))
        added = one["securityContext"].get("capabilities", {}).get("add", [])
        facts = [str(root), sealed, user, "".join(f",+{name.lower()}" for name in added)]
        own = [] if self._shares_processes() else ["--pid", "--fork", "--kill-child"]
        script = ["unshare", "--mount", *own, "bash", "-euc", _ENTER, "enter", *facts]
        return [*self._enter(self._pause), *script, *binds, "--", *clean, *words]

    def _shares_processes(self) -> bool:
        """Whether its processes are in the pod's PID namespace, or in the machine's."""
        return bool(self.spec.get("shareProcessNamespace") or self.spec.get("hostPID"))

    def _enter(self, process: subprocess.Popen[bytes]) -> list[str]:
        """Return the command that enters a process' namespaces."""
        target = str(inner_pid(process.pid))
        pid = [] if self.spec.get("hostPID") else ["--pid"]
        return ["nsenter", "--target", target, "--mount", "--ipc", *pid]

    def run_to_end(self, name: str, words: Sequence[str]) -> None:
        """Run an init container."""
        done = subprocess.run(
            self.command(name, words), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr

    def start(
        self,
        name: str,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a container that goes on; ``environment`` is what its image would bring."""
        command = self.command(name, words, environment)
        with log.open("ab") as file:
            self._running[name] = subprocess.Popen(command, stdout=file, stderr=file)

    def wait_started(self, name: str) -> None:
        """Return when the startup probe passed, asked for as long as the pod says."""
        one = next(each for each in containers(self.spec) if each["name"] == name)
        probe = one["startupProbe"]
        seconds = probe["periodSeconds"] * probe["failureThreshold"]
        wait_until(lambda: self.probe(name, "startupProbe"), f"{name} started", seconds, 0.1)

    def probe(self, name: str, which: str) -> bool:
        """Ask a container's HTTP probe once, as the kubelet does. The network is the machine's."""
        one = next(each for each in containers(self.spec) if each["name"] == name)
        assert self._running[name].poll() is None, f"{name} ended"
        get = one[which]["httpGet"]
        (port,) = [each["containerPort"] for each in one["ports"] if each["name"] == get["port"]]
        try:
            return Http(("127.0.0.1", port)).get(get["path"]).status == 200
        except OSError:
            return False

    def exec(self, name: str, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a container that runs, as ``kubectl exec`` does."""
        process = self._running[name]
        assert process.poll() is None, f"{name} ended with {process.returncode}"
        user = ["--root", "--wd=/", f"--setuid={self.user}", f"--setgid={self.user}"]
        one = next(each for each in containers(self.spec) if each["name"] == name)
        return subprocess.run(
            [*self._enter(process), *user, *environment_of(one, {}), *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def stop(self, name: str, grace_s: float) -> int:
        """Send SIGTERM to a container's process and return its exit code, within the grace."""
        process = self._running.pop(name)
        terminate(inner_pid(process.pid))
        return process.wait(grace_s)

    def wait(self, name: str) -> int:
        """Wait for a container that ends by itself; return its exit code."""
        return self._running.pop(name).wait(START_S)

    def kill(self, name: str) -> None:
        """Kill a container's process, as the kernel does when memory is short."""
        process = self._running.pop(name)
        subprocess.run(["kill", "-9", str(inner_pid(process.pid))], check=True)
        process.wait(START_S)

    def look(self, volume: str) -> Path:
        """Return a volume's directory as it can be read from outside of the pod."""
        return Path(f"/proc/{inner_pid(self._pause.pid)}/root{self.volume(volume)}")

    def close(self) -> None:
        """End everything at once."""
        for process in [*self._running.values(), self._pause]:
            if process.poll() is None:
                subprocess.run(["kill", "-9", str(inner_pid(process.pid))], check=False)
            process.wait(START_S)


def environment_of(one: Spec, more: Mapping[str, str]) -> list[str]:
    """Return the command that gives a container's variables to another one."""
    own = {each["name"]: each["value"] for each in one.get("env", []) if "value" in each}
    variables = [f"{key}={value}" for key, value in {**own, **more}.items()]
    return ["env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", *variables]


def inner_pid(pid: int) -> int:
    """Return the container's own process: the wrappers fork to be in another PID namespace."""
    while Path(f"/proc/{pid}/comm").read_text().strip() in ("nsenter", "unshare"):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            break
        pid = int(children[0])
    return pid


def terminate(pid: int) -> None:
    """Send SIGTERM, as the kubelet does."""
    subprocess.run(["kill", f"-{int(signal.SIGTERM)}", str(pid)], check=True)


@contextmanager
def running_pod(spec: Spec, images: Images, node: Path | None = None) -> Iterator[Pod]:
    """Yield a pod whose containers are not started yet; all of it is gone afterwards.

    ``node`` is the folder of its hostPaths; by default one of its own.
    """
    with tempfile.TemporaryDirectory(prefix="kvf-pod-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        pod = Pod(spec, folder, images, node or folder / "node")
        try:
            yield pod
        finally:
            pod.close()


def status_of(pod: Pod, entry: Sequence[str]) -> dict[str, Any]:
    """Return the sidecar's status, asked in its container without any flag."""
    done = pod.exec("kvferry", [*entry, "status", "--json"])
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document
