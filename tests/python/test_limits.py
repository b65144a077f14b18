"""Limits of memory and descriptors around the daemon and its clients."""

import contextlib
import re
import signal
import socket
import struct
import time

import modelcache
import pytest

from cachetest.daemon import (
    Daemon,
)
from cachetest.files import GOOD, sparse_st, st_tensors
from cachetest.limits import MemoryGroup, descriptor_limit
from cachetest.processes import Worker
from cachetest.waiting import eventually

MIB = 2**20


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


# ---- G1: memory limit of the control group -------------------------------------------------------


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


# ---- G2: few descriptors -------------------------------------------------------------------------


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
