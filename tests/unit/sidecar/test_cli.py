"""The command line: exit codes, errors with a remedy, and a status over a real socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from kvferry_connector.wire import attach
from kvferry_sidecar import cli
from kvferry_sidecar.cli import query
from kvferry_sidecar.config import CONFIG_ENV, KNOWN, Config, env_name
from kvferry_sidecar.errors import ExitCode, NoSidecarError
from kvferry_sidecar.observe import status


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [CONFIG_ENV, *map(env_name, KNOWN)]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(capsys):
    def run(*arguments):
        code = cli.main(arguments)
        text = capsys.readouterr()
        assert "Traceback" not in text.err
        return code, text.out, text.err

    return run


@pytest.fixture
def server(tmp_path):
    """Answer one connection on a real attach socket with given bytes, or leave it silent."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "attach.sock"))
    listener.listen()
    asked = []
    done = threading.Event()

    def answer(*pieces, silent=False):
        def serve():
            stream, _ = listener.accept()
            with stream:
                cut = attach.Reassembler()
                while not (bodies := cut.feed(stream.recv(4096))):
                    pass
                asked.extend(map(attach.read_from_peer, bodies))
                for piece in pieces:
                    stream.sendall(piece)
                if silent:
                    done.wait(90)

        thread = threading.Thread(target=serve)
        thread.start()
        threads.append(thread)
        return tmp_path

    threads = []
    answer.asked = asked
    yield answer
    done.set()
    for thread in threads:
        thread.join()
    listener.close()


def document():
    return status.encode(status.document(7, [], {"open": 3}, None, {"turns": 1}, {}))


def reply():
    return attach.encode(attach.StatusReply(document()))


def test_status_as_json(run, server):
    code, out, _ = run("status", "--json", "--run-dir", str(server(reply())))
    assert code == ExitCode.OK
    assert json.loads(out) == json.loads(document())
    assert server.asked == [attach.StatusQuery()]


def test_status_as_tables_from_an_answer_in_pieces(run, server):
    body = reply()
    run_dir = server(body[:3], body[3:20], body[20:])
    code, out, _ = run("status", "--run-dir", str(run_dir))
    assert code == ExitCode.OK
    assert "epoch 0000000000000007" in out
    assert "wanted beyond the engines' own" in out


def test_status_without_a_sidecar(run, tmp_path):
    code, _, err = run("status", "--run-dir", str(tmp_path))
    assert code == ExitCode.NO_SIDECAR
    assert f"no sidecar runs in {tmp_path}" in err
    assert "remedy: start one with `kvferry serve`" in err


def test_status_of_a_dead_sidecar(run, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(str(tmp_path / "attach.sock"))
    code, _, err = run("status", "--run-dir", str(tmp_path))
    assert code == ExitCode.NO_SIDECAR
    assert f"no sidecar runs in {tmp_path}" in err


def test_status_of_a_silent_sidecar(server):
    run_dir = server(silent=True)
    with pytest.raises(NoSidecarError, match=r"did not answer within 0\.2 s"):
        query.ask_status(run_dir, deadline_s=0.2)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((), "without an answer"),
        ((attach.encode(attach.Refused("busy", "too many connections")),), "too many connections"),
        ((attach.encode(attach.HeartbeatAck(1)),), "HeartbeatAck"),
        ((b"\x02\x00\x00\x00\xc1\xc1",), "no attach message"),
        ((b"\xff\xff\xff\xff",), "is over"),
        ((attach.encode(attach.StatusReply(b'{"format": 2}')),), "cannot be read"),
    ],
)
def test_status_from_something_else(run, server, answer, words):
    code, _, err = run("status", "--run-dir", str(server(*answer)))
    assert code == ExitCode.FAILED
    assert words in err
    assert "remedy:" in err


def test_serve_hands_the_configuration_to_the_app(run, monkeypatch, tmp_path):
    seen = []
    app = types.ModuleType("kvferry_sidecar.app")
    app.run = lambda loaded, read: seen.append(loaded.config) or read() is None
    monkeypatch.setitem(sys.modules, "kvferry_sidecar.app", app)
    monkeypatch.setattr("kvferry_sidecar.app", app, raising=False)
    file = tmp_path / "k.toml"
    file.write_text("[copy]\nthreads = 3\n")
    code, _, err = run(
        "serve", "--config", str(file), "--run-dir", str(tmp_path), "--pool-bytes", "2MiB",
        "--pool-name", "mine", "--set", "limits.ranks_max=2",
    )  # fmt: skip
    assert (code, err) == (ExitCode.OK, "")
    (config,) = seen
    assert isinstance(config, Config)
    assert (config.run_dir, config.copy.threads) == (tmp_path, 3)
    assert (config.tiers.host.bytes, config.tiers.host.name) == (2 << 20, "mine")
    assert config.limits.ranks_max == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--pool-bytes", "900TiB"], ExitCode.POOL, "does not fit /dev/shm"),
        (["serve", "--pool-bytes", "lots"], ExitCode.USAGE, "not a size"),
        (["serve", "--run-dir", "x"], ExitCode.USAGE, "relative"),
        (["serve", "--set", "limits.rank_max=1"], ExitCode.USAGE, "limits.ranks_max"),
        (["serve", "--set", "nothing"], ExitCode.USAGE, "--set KEY=VALUE"),
        (["serve", "--nonsense"], ExitCode.USAGE, "--nonsense"),
        (["nonsense"], ExitCode.USAGE, "nonsense"),
        (["config", "check", "/nowhere/k.toml"], ExitCode.USAGE, "cannot be read"),
        (["serve", "--pool-bytes", "9" * 5000], ExitCode.USAGE, "not a size"),
        (["serve", "--copy-threads", "9" * 5000], ExitCode.USAGE, "not a whole number"),
        (["serve", "--keys-max", "4000000000"], ExitCode.USAGE, "2147483647"),
        (["serve", "--set", "limits.jobs_max=9223372036854775808"], ExitCode.USAGE, "63 bits"),
        (["serve", "--set", "run_dir=/a\0b"], ExitCode.USAGE, "leave the NUL out"),
        (["explain", "\udcff", "--run-dir", "/nowhere"], ExitCode.USAGE, "is not utf-8"),
        (["top", "--interval", "nan"], ExitCode.USAGE, "is no number"),
        (["warm", "/", "--run-dir", "/nowhere"], ExitCode.NO_SIDECAR, "no sidecar runs"),
        (["ui", "--target", "a:1", "--listen", "a:b"], ExitCode.USAGE, "give host:port"),
        (["ui", "--target", "a:1", "--listen", "a" * 99 + ":1"], ExitCode.USAGE, "give host:port"),
    ],
)
def test_mistakes_end_with_a_code_and_words(run, arguments, code, words):
    got, _, err = run(*arguments)
    assert got == code
    assert words in err


def test_config_check(run, tmp_path, monkeypatch):
    file = tmp_path / "k.toml"
    file.write_text('[tiers.host]\nbytes = "1GiB"\n')
    monkeypatch.setenv("KVFERRY_LOG_LEVEL", "no level")  # a file is checked by itself
    assert run("config", "check", str(file))[0] == ExitCode.OK
    file.write_text('[tiers.host]\nbites = "1GiB"\n')
    code, _, err = run("config", "check", str(file))
    assert code == ExitCode.USAGE
    assert "did you mean tiers.host.bytes?" in err


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", b"[" * 5000, b"a = " + b"[" * 5000, b".".join([b"a"] * 3000) + b" = 1",
     b"run_dir = " + b"9" * 5000, b'tiers.host.bytes = "' + b"9" * 5000 + b'"', b"\0" * 99],
)  # fmt: skip
def test_a_file_of_nonsense_is_refused_in_a_few_words(run, tmp_path, text):
    file = tmp_path / "k.toml"
    file.write_bytes(text)
    code, _, err = run("config", "check", str(file))
    assert code == ExitCode.USAGE
    assert "remedy:" in err
    assert len(err) < 1000


def test_an_output_without_space_is_told_once():
    script = "import sys; from kvferry_sidecar.cli import main; sys.exit(main(['version']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.count("\n") == 2, done.stderr
    assert "no space is left" in done.stderr


def test_config_show_says_where_from(run, monkeypatch):
    monkeypatch.setenv("KVFERRY_LOG_LEVEL", "debug")
    code, out, _ = run("config", "show", "--pool-bytes", "1GiB")
    assert code == ExitCode.OK
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "environment KVFERRY_LOG_LEVEL" in rows["log.level"]
    assert "flag --pool-bytes" in rows["tiers.host.bytes"]
    assert "default, from tiers.host.bytes" in rows["tiers.host.slab_bytes"]


def test_demo_gets_its_arguments_and_returns_its_code(run, monkeypatch):
    from kvferry_demo import run as kvferry_demo

    seen = []
    monkeypatch.setattr(kvferry_demo, "main", lambda arguments: seen.append(arguments) or 1)
    code, _, _ = run("demo", "--model", "tiny", "--json", "out.json", "--prompts", "2")
    assert code == 1
    assert seen == [["--model", "tiny", "--json", "out.json", "--prompts", "2"]]


def test_help_and_version(run):
    code, out, _ = run("--help")
    assert code == ExitCode.OK
    assert all(name in out for name in ("serve", "status", "config", "demo", "version"))
    code, out, _ = run("version")
    assert code == ExitCode.OK
    assert "protocol" in out


def test_the_base_install_names_the_extra():
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('click', 'rich'):\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda n: None if n in ('click', 'rich') else real(n)\n"
        "from kvferry_sidecar.cli import main\n"
        "sys.exit(main(['status']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.USAGE
    assert "click, rich not installed" in done.stderr
    assert "pip install 'kvferry[sidecar]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_is_installed():
    done = subprocess.run(
        [Path(sys.executable).with_name("kvferry"), "config", "check", "/nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.USAGE
    assert "cannot be read" in done.stderr


def test_as_the_first_process_of_a_container_every_command_ends_on_sigterm(run, monkeypatch):
    """The kernel drops what a first process has no handler for."""
    former = signal.getsignal(signal.SIGTERM)
    try:
        assert run("version")[0] == ExitCode.OK
        assert signal.getsignal(signal.SIGTERM) is former
        monkeypatch.setattr(os, "getpid", lambda: 1)
        assert run("version")[0] == ExitCode.OK
        assert signal.getsignal(signal.SIGTERM) is not former
    finally:
        signal.signal(signal.SIGTERM, former)
