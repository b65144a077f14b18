"""The socket's path: who may take it, who starts a daemon, socket activation."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import modelcache
import pytest

from cachetest.daemon import (
    BUILD,
    DAEMON,
    Daemon,
    clean_environment,
    command_line,
    open_descriptors,
    run_ctl,
)
from cachetest.files import GOOD, sparse_st
from cachetest.processes import client_environment, exists
from cachetest.waiting import eventually


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


def ended(command, environment=None, seconds=10):
    """Runs a daemon that is expected to end by itself: (exit code, messages)."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment or clean_environment(),
    )
    return done.returncode, done.stderr + done.stdout


# ---- G5, G6, G7: the socket's path ---------------------------------------------------------------


def dead_socket(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))


def test_socket_of_a_dead_daemon_is_replaced(tmp_path):
    """G5 a"""
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    dead_socket(folder / "socket")
    start = time.monotonic()
    with Daemon(folder) as daemon:
        assert time.monotonic() - start < 1.5
        daemon.alive_probe()


def test_daemon_killed_hard_can_be_started_again(tmp_path):
    """G5 a"""
    daemon = Daemon(tmp_path / "d")
    daemon.process.kill()
    daemon.process.wait()
    daemon.start()
    daemon.alive_probe()
    daemon.stop()


def test_living_daemon_is_left_alone(daemon):
    """G5 b"""
    code, message = ended([DAEMON, "--socket", daemon.socket])
    assert code != 0
    assert "already running" in message and str(daemon.pid) in message


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing", "folder"])
def test_other_things_at_the_path_are_left_alone(tmp_path, kind):
    """G5 c and d"""
    target = tmp_path / "socket"
    if kind == "file":
        target.write_text("precious")
    elif kind == "folder":
        target.mkdir()
    else:
        if kind == "link to a file":
            (tmp_path / "precious").write_text("precious")
        target.symlink_to(tmp_path / "precious")
    before = os.lstat(target)
    code, message = ended([DAEMON, "--socket", str(target)])
    assert code != 0 and str(target) in message
    assert os.lstat(target).st_ino == before.st_ino
    if kind in ("file", "link to a file"):
        assert target.read_text() == "precious"


def test_folder_without_write_permission(short):
    """G5 e: root may write anywhere, so another user tries."""
    nobody = 65534
    folder = short / "closed"
    folder.mkdir(mode=0o500)
    user = {}
    if os.geteuid() == 0:
        short.chmod(0o755)
        os.chown(folder, nobody, nobody)
        user = {"user": nobody, "group": nobody}
        try:
            subprocess.run([DAEMON, "--version"], capture_output=True, check=True, **user)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip(f"another user cannot run {DAEMON}")
    done = subprocess.run(
        [DAEMON, "--socket", folder / "socket"],
        capture_output=True,
        text=True,
        timeout=10,
        env=clean_environment(),
        **user,
    )
    assert done.returncode != 0
    assert str(folder) in done.stderr and "ermission" in done.stderr


def test_folder_that_is_not_there_or_cannot_be_made(tmp_path):
    """G5 e, for root too"""
    code, message = ended([DAEMON, "--socket", "/proc/nowhere/socket"])
    assert code != 0 and "/proc/nowhere" in message


def living(processes):
    return [p for p in processes if p.poll() is None]


@pytest.mark.parametrize("round_number", range(10))
def test_twenty_daemons_at_once(tmp_path, round_number):
    """G6"""
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    dead_socket(folder / "socket")
    logs = [open(tmp_path / f"log{i}", "w") for i in range(20)]
    processes = [
        subprocess.Popen(
            [DAEMON, "--socket", str(folder / "socket")],
            stderr=log,
            stdout=log,
            env=clean_environment(),
        )
        for log in logs
    ]
    try:
        eventually(lambda: len(living(processes)) == 1, 20, "the end of all but one daemon")
        (winner,) = living(processes)
        with modelcache.Client(str(folder / "socket"), autostart=False) as client:
            assert client.status()["daemon_pid"] == winner.pid
        losers = [i for i, p in enumerate(processes) if p is not winner]
        for i in losers:
            assert processes[i].returncode != 0
            assert "already running" in (tmp_path / f"log{i}").read_text()
    finally:
        for process in living(processes):
            process.terminate()
        for process, log in zip(processes, logs):
            process.wait(timeout=10)
            log.close()


def test_twenty_clients_that_start_a_daemon(tmp_path, path):
    """G6"""
    where = tmp_path / "auto" / "socket"
    where.parent.mkdir(mode=0o700)
    script = (
        "import sys, modelcache\n"
        "m = modelcache.open(sys.argv[1])\n"
        "print(modelcache.status()['daemon_pid'], m.raw('w').cast('f').tolist(), flush=True)\n"
    )
    environment = client_environment(
        MODELCACHE_SOCKET=str(where), MODELCACHE_AUTOSTART="1", MODELCACHE_DAEMON=str(DAEMON)
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(20)
    ]
    try:
        answers = [process.communicate(timeout=60) for process in processes]
        pids = {out.split()[0] for out, err in answers if out}
        assert all("[1.0, 2.0]" in out for out, err in answers), answers
        assert len(pids) == 1
        (pid,) = map(int, pids)
        assert exists(pid), "a started daemon must outlive the client that started it"
    finally:
        run_ctl("--socket", where, "shutdown")
    eventually(lambda: not exists(pid), what="the end of the daemon")


def test_named_socket_in_a_missing_folder_starts_nothing(tmp_path, path):
    """A mistyped path is an error, not a new folder with a second daemon in it."""
    where = tmp_path / "mistyped" / "socket"
    environment = client_environment(MODELCACHE_AUTOSTART="1", MODELCACHE_DAEMON=str(DAEMON))
    for named in ([], ["--socket", where]):
        changed = environment if named else {**environment, "MODELCACHE_SOCKET": str(where)}
        done = run_ctl(*named, "load", path, environment=changed, check=3)
        assert str(where) in done.stderr and "does not exist" in done.stderr
    with pytest.raises(modelcache.UnavailableError, match="does not exist"):
        modelcache.Client(where, autostart=True)
    assert not where.parent.exists()


def test_named_socket_in_a_folder_that_is_there_starts_a_daemon(tmp_path, path):
    where = tmp_path / "socket"
    environment = client_environment(MODELCACHE_AUTOSTART="1", MODELCACHE_DAEMON=str(DAEMON))
    try:
        run_ctl("--socket", where, "load", path, environment=environment, check=0)
    finally:
        run_ctl("--socket", where, "shutdown", check=0)


def test_default_socket_of_the_module_has_its_folder_made(short, path):
    """The functions of the module name no socket: theirs is the default, with its checks."""
    script = (
        "import sys, modelcache\n"
        "print(modelcache.open(sys.argv[1]).raw('w').cast('f').tolist())\n"
        "modelcache.default_client().shutdown()\n"
    )
    environment = client_environment(
        XDG_RUNTIME_DIR=str(short), MODELCACHE_AUTOSTART="1", MODELCACHE_DAEMON=str(DAEMON)
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "[1.0, 2.0]\n", done.stderr
    assert (short / "modelcache").stat().st_mode & 0o777 == 0o700


def test_no_daemon_is_started_when_it_must_not_be(tmp_path):
    with pytest.raises(modelcache.UnavailableError) as caught:
        modelcache.Client(tmp_path / "socket", autostart=False)
    assert isinstance(caught.value, ConnectionError) and "socket" in str(caught.value)


def long_path(folder, length, character="x"):
    rest = length - len(os.fsencode(str(folder))) - 1
    name = character * (rest // len(character.encode()))
    return folder / name.ljust(len(name) + rest - len(name.encode()), "x")


@pytest.fixture
def short():
    """A folder with a short name: pytest's own leave too little of the 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mc", dir="/tmp") as folder:
        yield Path(folder)


def test_socket_path_of_107_bytes(short):
    """G7"""
    target = long_path(short, 107)
    assert len(os.fsencode(target)) == 107
    with Daemon(short / "d", socket=target) as daemon:
        daemon.alive_probe()


@pytest.mark.parametrize("length, character", [(108, "x"), (200, "x"), (120, "模")])
def test_longer_socket_paths_are_refused_with_both_numbers(short, length, character):
    """G7: by the daemon, the tool and the client, before anything starts."""
    target = long_path(short, length, character)
    assert len(os.fsencode(target)) == length
    code, message = ended([DAEMON, "--socket", str(target)])
    assert code != 0 and str(length) in message and "107" in message
    done = run_ctl("--socket", target, "status")
    assert done.returncode != 0 and str(length) in done.stderr and "107" in done.stderr
    with pytest.raises(ValueError, match=f"{length}.*107"):
        modelcache.Client(target, autostart=False)
    assert not target.exists()


def test_long_default_folder_is_refused_alike(short, monkeypatch):
    """G7, through the folder variable"""
    folder = str(long_path(short, 120))
    environment = clean_environment(XDG_RUNTIME_DIR=folder)
    for program in ([DAEMON], [str(BUILD / "bin" / "modelcachectl"), "status"]):
        code, message = ended(program, environment)
        assert code != 0 and "107" in message, (program, message)


# ---- G8: socket activation -----------------------------------------------------------------------

ACTIVATE = """
import json, os, socket, sys
kind, path, count, whose, command = json.loads(sys.argv[1])
if kind == "pipe":
    number, _keep = os.pipe()
else:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    number = listener.detach()
if number != 3:
    os.dup2(number, 3)
else:
    os.set_inheritable(3, True)
if count > 1:
    os.dup2(3, 4)
os.environ["LISTEN_FDS"] = str(count)
os.environ["LISTEN_PID"] = str(os.getpid() if whose == "own" else whose)
os.execv(command[0], command)
"""


def activated(kind, path, count, whose, *options):
    import json

    command = [str(DAEMON), *options]
    return [sys.executable, "-c", ACTIVATE, json.dumps([kind, str(path), count, whose, command])]


def test_socket_activation(tmp_path):
    """G8 a: serves on the passed socket, keeps its file, passes nothing on."""
    folder = tmp_path / "d"
    folder.mkdir(mode=0o700)
    where = folder / "socket"
    large = sparse_st(tmp_path / "large.safetensors", 256)
    process = subprocess.Popen(
        activated("socket", where, 1, "own"), env=clean_environment(), stderr=subprocess.PIPE
    )
    try:

        def answers():
            with contextlib.suppress(modelcache.UnavailableError):
                return modelcache.Client(where, autostart=False)

        client = eventually(answers, what="an answer")
        assert client.status()["daemon_pid"] == process.pid
        import threading

        outcome = []
        opening = threading.Thread(target=lambda: outcome.append(client.open(large)))
        opening.start()
        from cachetest.daemon import children

        def loaders():
            return [p for p in children(process.pid) if "modelcached-loader" in command_line(p)]

        (loader,) = eventually(loaders, what="a loader")
        os.kill(loader, signal.SIGSTOP)
        try:
            listening = os.readlink(f"/proc/{process.pid}/fd/3")
            assert listening.startswith("socket:")
            assert listening not in open_descriptors(loader).values()
            environment = Path(f"/proc/{loader}/environ").read_bytes()
            assert b"LISTEN_" not in environment
        finally:
            os.kill(loader, signal.SIGCONT)
        opening.join(timeout=30)
        assert len(outcome) == 1
        client.close()
    finally:
        process.terminate()
        _, message = process.communicate(timeout=10)
    assert process.returncode == 0, message
    assert where.exists(), "the service manager owns the socket file"


def test_activation_meant_for_another_process_is_ignored(tmp_path):
    """G8 b"""
    own, passed = tmp_path / "own", tmp_path / "passed"
    own.mkdir(mode=0o700)
    process = subprocess.Popen(
        activated("socket", passed, 1, 1, "--socket", str(own / "socket")),
        env=clean_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:

        def answers():
            with contextlib.suppress(modelcache.UnavailableError):
                modelcache.Client(own / "socket", autostart=False).close()
                return True

        eventually(answers, what="an answer on its own path")
    finally:
        process.terminate()
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize("kind, count, needle", [("socket", 2, "2"), ("pipe", 1, "socket")])
def test_activation_with_the_wrong_descriptors(tmp_path, kind, count, needle):
    """G8 c and d"""
    code, message = ended(activated(kind, tmp_path / "s", count, "own"))
    assert code != 0 and needle in message and "Traceback" not in message
