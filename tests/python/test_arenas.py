"""How clients come by the daemon's memory, and what they refuse to map."""

import mmap
import os
from pathlib import Path

import modelcache
import pytest

from cachetest.daemon import (
    Daemon,
    open_descriptors,
)
from cachetest.files import GOOD, sparse_st
from cachetest.limits import pid_namespace
from cachetest.processes import Worker
from cachetest.wire import OPEN, FakeDaemon


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


# ---- G3, G4: another PID namespace, a pid that means somebody else -------------------------------


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
