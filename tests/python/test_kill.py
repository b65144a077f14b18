"""kill -9 of anybody leaves the daemon's figures as they were."""

import contextlib
import os
import signal

import pytest

from cachetest.daemon import lasting_descriptors
from cachetest.files import sparse_st
from cachetest.processes import Worker, exists
from cachetest.waiting import eventually
from cachetest.wire import OPEN, REPLY, Raw, frame

HOLD = """
model = client.open(arguments["path"])
say(bytes(model.raw("t0")[:4]).hex())
wait()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return sparse_st(tmp_path_factory.mktemp("kill") / "m.safetensors", 8)


@pytest.fixture(autouse=True)
def loaded(daemon, path):
    with daemon.client() as client:
        client.open(path).close()
    eventually(lambda: daemon.status()["leases"] == 0, what="the end of the lease")


def test_client_that_holds_a_lease(daemon, path):
    before = daemon.resting_figures()
    descriptors = lasting_descriptors(daemon.pid)
    with Worker(daemon, HOLD, path=path) as worker:
        worker.hear()
        assert daemon.figures()["leases"] == before["leases"] + 1
        worker.kill()
    daemon.comes_back_to(before)
    eventually(lambda: lasting_descriptors(daemon.pid) == descriptors, what="closed descriptors")
    daemon.ctl("evict", path, check=0)


def test_hundred_clients_that_hold_leases(daemon, path):
    """Each a process of its own with a raw connection and a lease, killed in one stroke."""
    before = daemon.resting_figures()
    descriptors = lasting_descriptors(daemon.pid)
    children = []
    try:
        for _ in range(100):
            ready, tell = os.pipe()
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    peer = Raw(daemon.socket)
                    source = os.open(path, os.O_RDONLY)
                    body = {"files": [{"name": path.name, "path": str(path)}]}
                    peer.send(frame(OPEN, body, fds=1), [source])
                    if peer.receive()[1] == REPLY:
                        os.write(tell, b"!")
                    signal.pause()
                os._exit(1)
            os.close(tell)
            children.append((child, ready))
        assert all(os.read(ready, 1) == b"!" for _, ready in children)
        assert daemon.figures()["leases"] == before["leases"] + 100
    finally:
        for child, ready in children:
            os.kill(child, signal.SIGKILL)
            os.close(ready)
        for child, _ in children:
            os.waitpid(child, 0)
    daemon.comes_back_to(before)
    eventually(lambda: lasting_descriptors(daemon.pid) == descriptors, what="closed descriptors")


def test_loader_killed_in_mid_load(daemon, tmp_path):
    before = daemon.resting_figures()
    descriptors = lasting_descriptors(daemon.pid)
    large = sparse_st(tmp_path / "large.safetensors", 256)
    code = """
    say("ready")
    wait()
    try:
        client.open(arguments["path"])
        say("loaded")
    except modelcache.Error as failure:
        say(failure.status)
    """
    with Worker(daemon, code, path=large) as worker:
        worker.hear()
        worker.go()
        pid = daemon.stopped_loader(large)
        os.kill(pid, signal.SIGKILL)
        assert worker.hear() == "loader_failed"
    daemon.comes_back_to(before)
    eventually(lambda: lasting_descriptors(daemon.pid) == descriptors, what="closed descriptors")


def test_loader_dies_with_its_daemon(tmp_path):
    from cachetest.daemon import Daemon

    large = sparse_st(tmp_path / "large.safetensors", 256)
    daemon = Daemon(tmp_path / "d")
    try:
        with Worker(
            daemon, 'say("ready")\nwait()\nclient.open(arguments["path"])', path=large
        ) as w:
            w.hear()
            w.go()
            pid = daemon.stopped_loader(large)
            daemon.process.kill()
            daemon.process.wait()
            eventually(lambda: not exists(pid), what="the end of the loader")
            assert w.finish() != 0
    finally:
        daemon.process.kill()
        daemon.process.wait()
