"""Processes, sockets and limits: starting, sharing, forking, being refused."""

import contextlib
import mmap
import os
import re
import signal
import socket
import struct
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
    memory_of,
    open_descriptors,
    run_ctl,
)
from cachetest.files import GOOD, sparse_st, st, st_tensors
from cachetest.limits import MemoryGroup, descriptor_limit, pid_namespace
from cachetest.processes import Worker, ask, client_environment, exists
from cachetest.waiting import eventually
from cachetest.wire import EVENT, OPEN, FakeDaemon

MIB = 2**20
READ = """
model = client.open(arguments["path"])
say([model.raw(name).tobytes().hex()[:64] for name in list(model)[:1]])
"""


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


# ---- G1: memory limit of the control group ------------------------------------------------------


def test_daemon_and_loader_under_a_memory_limit(tmp_path):
    """G1 a: the client hears of it; the daemon lives, or its end is an error of the client."""
    large = sparse_st(tmp_path / "large.safetensors", 128)
    with MemoryGroup(64 * MIB) as group:
        daemon = Daemon(tmp_path / "d", prefix=group.prefix)
        try:
            start = time.monotonic()
            with daemon.client() as client, pytest.raises(modelcache.Error) as caught:
                client.open(large)
            assert time.monotonic() - start < 10
            message = str(caught.value)
            if caught.value.status == "loader_failed":
                assert "signal 9" in message and "memory" in message, message
            else:
                assert caught.value.status == "no_room", message
                assert len(re.findall(r"\d+", message)) >= 2, message
            daemon.alive_probe()
        finally:
            daemon.stop()


def test_client_under_a_memory_limit_reads_a_larger_model(tmp_path, daemon):
    """G1 b: whoever wrote the pages is charged for them."""
    large = sparse_st(tmp_path / "large.safetensors", 128)
    with daemon.client() as loading:
        loading.open(large).close()
    code = """
    import hashlib
    say("ready")
    wait()
    model = client.open(arguments["path"])
    say(hashlib.sha256(model.raw("t0")).hexdigest())
    wait()
    """
    with MemoryGroup(64 * MIB) as group:
        with Worker(daemon, code, prefix=group.prefix, path=large) as worker:
            worker.hear()
            before = group.charged_bytes()
            worker.go()
            assert worker.hear()
            assert group.charged_bytes() - before < 8 * MIB
            assert worker.finish() == 0


def test_client_under_a_memory_limit_that_writes_all_is_killed(tmp_path, daemon):
    """G1 c: its copies are its own; the kernel ends it, and nobody else notices."""
    large = sparse_st(tmp_path / "large.safetensors", 128)
    code = """
    model = client.open(arguments["path"])
    say("ready")
    raw = model.raw("t0")
    for start in range(0, len(raw), 4096):
        raw[start] = 1
    say("survived")
    """
    with MemoryGroup(64 * MIB) as group:
        with Worker(daemon, code, prefix=group.prefix, path=large) as worker:
            assert worker.hear() == "ready"
            assert worker.process.wait(timeout=30) == -signal.SIGKILL
    eventually(lambda: daemon.status()["leases"] == 0, what="the end of its lease")


# ---- G2: few descriptors ------------------------------------------------------------------------


def test_descriptors_grow_with_arenas_not_with_tensors(tmp_path, daemon):
    """G2"""
    many = tmp_path / "many.safetensors"
    many.write_bytes(
        st_tensors({f"t{i}": ("F32", [4], struct.pack("<4f", i, 0, 0, 0)) for i in range(5000)})
    )
    code = """
    before = len(os.listdir("/proc/self/fd"))
    model = client.open(arguments["path"])
    values = [model.raw(f"t{i}").cast("f")[0] for i in range(5000)]
    say([len(os.listdir("/proc/self/fd")) - before, values == list(range(5000))])
    """
    with Worker(daemon, code, prefix=descriptor_limit(64), path=many) as worker:
        grown, right = worker.hear()
    assert right and grown <= 8


def test_two_hundred_models_with_sixty_four_descriptors(tmp_path, daemon):
    """G2"""
    for i in range(200):
        data = GOOD[:-8] + struct.pack("<2f", i, i)
        (tmp_path / f"m{i}.safetensors").write_bytes(data)
    code = """
    held = [client.open(f"{arguments['folder']}/m{i}.safetensors") for i in range(200)]
    say([model.raw("w").cast("f")[0] for model in held] == list(range(200)))
    """
    with Worker(daemon, code, prefix=descriptor_limit(64), folder=tmp_path) as worker:
        assert worker.hear() is True
        assert worker.finish() == 0
    daemon.evict_all()


def test_client_at_its_descriptor_limit_gets_an_error_that_names_it(path, daemon):
    """G2: and the connection stays usable once there is room again."""
    code = """
    import resource
    client.status()
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))
    try:
        while True:
            os.open("/dev/null", os.O_RDONLY)
    except OSError:
        pass
    try:
        client.open(arguments["path"])
        say("opened")
    except modelcache.Error as failure:
        say([failure.status, str(failure)])
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    say(client.open(arguments["path"]).raw("w").cast("f").tolist())
    """
    with Worker(daemon, code, path=path) as worker:
        status, message = worker.hear()
        assert status == "limit" and "descriptor" in message, (status, message)
        assert worker.hear() == [1.0, 2.0]


def test_daemon_at_its_descriptor_limit(tmp_path, path):
    """G2: a hundred clients of a daemon with 32 descriptors: served, or told the limit."""
    with Daemon(tmp_path / "d", prefix=descriptor_limit(32)) as daemon:
        peers = []
        try:
            for _ in range(100):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peer.setblocking(False)
                with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                    peer.connect(daemon.socket)
                peers.append(peer)
            assert daemon.process.poll() is None
        finally:
            for peer in peers:
                peer.close()
        eventually(lambda: served(daemon), what="service after the crowd")
        daemon.alive_probe()


def served(daemon):
    with contextlib.suppress(modelcache.Error):
        return daemon.status()["clients"] == 1
    return False


def test_load_at_the_daemons_descriptor_limit_is_a_clear_error(tmp_path):
    """G2: models held until the descriptors are gone."""
    with Daemon(tmp_path / "d", prefix=descriptor_limit(32)) as daemon, daemon.client() as client:
        held = []
        for i in range(64):
            path = tmp_path / f"m{i}.safetensors"
            path.write_bytes(GOOD[:-8] + struct.pack("<2f", i, i))
            try:
                held.append(client.open(path))
            except modelcache.Error as failure:
                assert failure.status in ("limit", "no_room"), failure
                assert "descriptor" in str(failure)
                break
        else:
            pytest.fail("64 models in a process with 32 descriptors")
        assert held[0].raw("w").cast("f").tolist() == [0.0, 0.0]
        assert client.status()["daemon_pid"] == daemon.pid


# ---- G3, G4: another PID namespace, a pid that means somebody else ------------------------------


def test_daemon_in_another_pid_namespace(tmp_path, path):
    """G3: descriptors travel through the socket."""
    daemon = Daemon(tmp_path / "d", prefix=pid_namespace())
    try:
        with daemon.client() as client:
            assert client.daemon_pid < 100
            assert client.open(path).raw("w").cast("f").tolist() == [1.0, 2.0]
            large = sparse_st(tmp_path / "large.safetensors", 16)
            assert bytes(client.open(large).raw("t0")[:4]) == str(large).encode()[:4]
    finally:
        daemon.stop()


def test_client_in_another_pid_namespace(daemon, path):
    """G3, the other way round."""
    code = 'say(client.open(arguments["path"]).raw("w").cast("f").tolist())'
    with Worker(daemon, code, prefix=pid_namespace(), path=path) as worker:
        assert worker.hear() == [1.0, 2.0]


def test_client_without_procfs(daemon, path):
    code = 'say(client.open(arguments["path"]).raw("w").cast("f").tolist())'
    pid_namespace()  # skips where namespaces cannot be made
    prefix = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
    with Worker(daemon, code, prefix=prefix, path=path) as worker:
        assert worker.hear() == [1.0, 2.0]


def memfd(size=8192, seal=True):
    import fcntl

    descriptor = os.memfd_create("lie", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.truncate(descriptor, size)
    if seal:
        fcntl.fcntl(descriptor, 1033, 0xF)  # F_ADD_SEALS: seal, shrink, grow, write
    return descriptor


LIES = {
    "ordinary file": lambda folder: (os.open(folder / "m.safetensors", os.O_RDONLY), {}),
    "smaller than told": lambda folder: (memfd(4096), {"size_bytes": 1 << 40}),
    "unsealed": lambda folder: (memfd(seal=False), {}),
    "sealed zeros": lambda folder: (memfd(), {}),
    "another inode": lambda folder: (memfd(), {"inode": 1}),
    "no bytes": lambda folder: (memfd(0), {}),
    "size beyond everything": lambda folder: (memfd(), {"size_bytes": 2**63}),
    "descriptor -1": lambda folder: (memfd(), {"fd": -1}),
    "descriptor of nothing": lambda folder: (memfd(), {"fd": 99999}),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_client_refuses_what_is_not_an_arena(tmp_path, path, lie):
    """G4: before it maps anything."""
    descriptor, claims = lie(tmp_path)
    stat = os.fstat(descriptor)
    arena = {
        "id": "1" * 32,
        "fd": descriptor,
        "inode": stat.st_ino,
        "size_bytes": stat.st_size,
        **claims,
    }

    def answer(kind, body):
        if kind != OPEN:
            return {}
        return {"model_id": "2" * 32, "name": "m", "lease": 1, "hit": True, "arenas": [arena]}

    maps = Path("/proc/self/maps")
    with FakeDaemon(tmp_path / "fake", answer) as fake:
        client = modelcache.Client(fake.path, autostart=False)
        before = maps.read_text().count("memfd:lie")
        with pytest.raises(modelcache.Error) as caught:
            client.open(path, timeout=5)
        assert caught.value.status in ("corrupt", "protocol", "not_found", "system", "limit"), (
            caught.value
        )
        assert str(caught.value)
        assert maps.read_text().count("memfd:lie") == before
        client.close()
    os.close(descriptor)


def test_client_refuses_answers_without_arenas(tmp_path, path):
    def answer(kind, body):
        return {"model_id": "2" * 32, "name": "m", "lease": 1, "hit": True, "arenas": []}

    with FakeDaemon(tmp_path / "fake", answer) as fake:
        with modelcache.Client(fake.path, autostart=False) as client:
            with pytest.raises(modelcache.Error):
                client.open(path, timeout=5)


@pytest.mark.parametrize(
    "reply", [b"", b"\0" * 64, b"MDLC", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 4096]
)
def test_client_survives_a_daemon_that_talks_nonsense(tmp_path, path, reply):
    with FakeDaemon(tmp_path / "fake", lambda kind, body: reply) as fake:
        with modelcache.Client(fake.path, autostart=False) as client:
            with pytest.raises(modelcache.Error) as caught:
                client.open(path, timeout=0.5)
            assert caught.value.status in ("protocol", "timeout", "unavailable")


def test_a_mapped_arena_cannot_be_written_by_others(daemon, client, path):
    """G9: whoever opens the daemon's memory file can neither map it shared nor cut it."""
    client.open(path)
    arenas = [n for n, what in open_descriptors(daemon.pid).items() if "memfd:" in what]
    assert arenas
    for number in arenas:
        descriptor = os.open(f"/proc/{daemon.pid}/fd/{number}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, b"x", 0)
        finally:
            os.close(descriptor)


# ---- G5, G6, G7: the socket's path --------------------------------------------------------------


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


# ---- G8: socket activation ----------------------------------------------------------------------

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


# ---- G9, G10, G11: what the daemon is -----------------------------------------------------------


def test_daemon_maps_no_heavy_library(daemon, client, path):
    """G11"""
    client.open(path)
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    for name in ("libtorch", "libcuda", "libc10", "libpython"):
        assert name not in maps, name


def test_idle_daemon_is_small(tmp_path):
    with Daemon(tmp_path / "d") as idle:
        assert memory_of(idle.pid, "Rss") <= 10 * MIB


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_memfds_under_every_exec_policy(tmp_path, path, choice):
    """G10: the setting belongs to the PID namespace, so nothing outside changes."""
    if not Path("/proc/sys/vm/memfd_noexec").exists():
        pytest.skip("this kernel has no vm.memfd_noexec")
    prefix = pid_namespace(f"echo {choice} > /proc/sys/vm/memfd_noexec")
    daemon = Daemon(tmp_path / "d", prefix=prefix)
    try:
        with daemon.client() as client:
            model = client.open(path)
            assert model.raw("w").cast("f").tolist() == [1.0, 2.0]
    finally:
        daemon.stop()


def test_memfds_are_not_executable(daemon, client, path):
    """G10"""
    client.open(path)
    arenas = [n for n, what in open_descriptors(daemon.pid).items() if "memfd:" in what]
    for number in arenas:
        assert os.stat(f"/proc/{daemon.pid}/fd/{number}").st_mode & 0o111 == 0


def test_memfd_that_is_refused_the_flag_falls_back(tmp_path):
    """G10: kernels before 6.3 answer EINVAL; tests/unit fails the call instead of a kernel."""
    source = Path(__file__).resolve().parents[1] / "unit" / "memfd_test.cc"
    assert "EINVAL" in source.read_text()


def test_loading_initialises_no_gpu_in_client_or_daemon(daemon, path):
    """G11: a parent that loaded can fork workers that load."""
    code = """
    import torch
    model = client.open(arguments["path"])
    model["w"].sum()
    codes = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                ok = client.open(arguments["path"])["w"].tolist() == [1.0, 2.0]
                os._exit(0 if ok else 1)
            except BaseException:
                os._exit(2)
        codes.append(os.waitpid(pid, 0)[1])
    say([torch.cuda.is_initialized(), codes])
    """
    assert ask(daemon, code, path=path) == [False, [0, 0, 0, 0]]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_gpu_that_is_not_there_is_a_clear_error(tmp_path, refused):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    script = torch.jit.script(torch.nn.Linear(2, 2))
    script.save(str(tmp_path / "s.pt"))
    refused(
        tmp_path / "s.pt",
        "cuda",
        device="cuda:0",
        status=("unsupported", "invalid_argument", "bad_file"),
    )


# ---- G12: fork ----------------------------------------------------------------------------------


def test_fork_after_loading(tmp_path, daemon, path):
    """G12"""
    other = tmp_path / "other.safetensors"
    other.write_bytes(GOOD[:-8] + struct.pack("<2f", 7, 8))
    square = tmp_path / "square.safetensors"
    square.write_bytes(st_tensors({"m": ("F32", [256, 256], os.urandom(4) * 256 * 256)}))
    code = """
    import torch
    w = client.open(arguments["path"])["w"]
    m = client.open(arguments["square"])["m"]
    (m @ m).sum()
    codes = []
    for leave in (os._exit, sys.exit):
        pid = os.fork()
        if pid == 0:
            try:
                assert w.tolist() == [1.0, 2.0]
                w += 1
                assert w.tolist() == [2.0, 3.0]
                assert client.open(arguments["other"])["w"].tolist() == [7.0, 8.0]
                leave(0)
            except AssertionError:
                os._exit(9)
            except SystemExit:
                raise
        codes.append(os.waitpid(pid, 0)[1])
    say([codes, w.tolist(), client.status()["clients"], client.status()["leases"]])
    wait()
    """
    with Worker(daemon, code, path=path, other=other, square=square) as worker:
        codes, values, clients, leases = worker.hear()
        assert (codes, values) == ([0, 0], [1.0, 2.0])
        eventually(lambda: daemon.status()["leases"] == 2, what="only the parent's leases")
        eventually(lambda: daemon.status()["clients"] == 2, what="only the parent's connection")
        assert worker.finish() == 0
    eventually(lambda: daemon.status()["leases"] == 0, what="the end of all leases")


def test_parent_and_child_never_get_each_others_answers(tmp_path, daemon):
    """G12: a thousand interleaved calls of both, each model its own."""
    for i in range(2):
        (tmp_path / f"{i}.safetensors").write_bytes(GOOD[:-8] + struct.pack("<2f", i, i))
    code = """
    client.status()
    pid = os.fork()
    mine = 1 if pid == 0 else 0
    path = f"{arguments['folder']}/{mine}.safetensors"
    right = 0
    for n in range(500):
        if client.open(path).raw("w").cast("f").tolist() == [float(mine)] * 2:
            right += 1
        assert client.call("why", model=path)["model"]
    if pid == 0:
        os._exit(0 if right == 500 else 1)
    say([right, os.waitpid(pid, 0)[1]])
    """
    assert ask(daemon, code, folder=tmp_path) == [500, 0]


def test_threads_share_a_client(tmp_path, client):
    import threading

    for i in range(8):
        (tmp_path / f"{i}.safetensors").write_bytes(GOOD[:-8] + struct.pack("<2f", i, i))
    wrong = []

    def work(i):
        for _ in range(50):
            values = client.open(tmp_path / f"{i}.safetensors").raw("w").cast("f").tolist()
            if values != [float(i)] * 2:
                wrong.append((i, values))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- daemon restart -----------------------------------------------------------------------------


def test_client_reconnects_to_a_restarted_daemon(tmp_path, path):
    daemon = Daemon(tmp_path / "d")
    client = daemon.client()
    held = client.open(path)
    daemon.stop()
    assert held.raw("w").cast("f").tolist() == [1.0, 2.0]
    daemon.start()
    assert client.open(path).raw("w").cast("f").tolist() == [1.0, 2.0]
    held.close()
    client.close()
    daemon.stop()


def test_clean_stop(tmp_path, path):
    daemon = Daemon(tmp_path / "d")
    with daemon.client() as client:
        client.open(path).close()
    assert daemon.stop() == 0
    assert not Path(daemon.socket).exists()


def test_events_need_no_reply():
    """The constants of the hand-written wire agree with the header the daemon is built from."""
    header = (Path(__file__).resolve().parents[2] / "proto" / "frame.h").read_text()
    assert re.search(rf"kFlagEvent = {EVENT};", header)
    assert re.search(rf"kOpen = {OPEN},", header)


def test_unaligned_file_data_is_no_obstacle(tmp_path, client):
    """Header lengths need not be multiples of eight: the arena aligns what the file does not."""
    for extra in range(8):
        header = '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + " " * extra
        unpadded = tmp_path / f"u{extra}.safetensors"
        unpadded.write_bytes(st(header, struct.pack("<2f", 1, 2), pad=False))
        assert client.open(unpadded)["w"].tolist() == [1.0, 2.0]
