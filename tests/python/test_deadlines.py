"""A call ends with its deadline, whatever the daemon does, and leaves nothing behind."""

import contextlib
import os
import signal
import socket
import time

import modelcache
import pytest

from cachetest.daemon import Daemon, run_ctl
from cachetest.files import GOOD
from cachetest.processes import client_environment
from cachetest.waiting import eventually

# Far above the deadlines of these tests, far below the ten seconds the library gives a greeting.
SOON = 5.0


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def silent(tmp_path):
    """A socket whose listener never says a word; gives its path."""
    where = tmp_path / "silent"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(where))
        listener.listen()
        yield where


def test_open_given_up_while_the_daemon_stood_still_leaves_no_lease(tmp_path, path):
    """The client does nothing more that could tell the daemon; another model keeps it connected."""
    other = tmp_path / "other.safetensors"
    other.write_bytes(GOOD)
    with Daemon(tmp_path / "d") as daemon, daemon.client() as client:
        client.open(path).close()
        kept = client.open(other)
        eventually(lambda: daemon.status()["leases"] == 1, what="the end of the first lease")
        with stopped(daemon.pid), pytest.raises(modelcache.DeadlineError):
            client.open(path, timeout=0.1)
        eventually(lambda: daemon.status()["hits"] == 1, what="the late answer")
        eventually(lambda: daemon.status()["leases"] == 1, what="the end of its lease")
        assert kept.raw("w").cast("f").tolist() == [1.0, 2.0]
        assert client.open(path).hit


def test_greeting_counts_for_the_deadline_of_the_module(silent, path, monkeypatch):
    monkeypatch.setenv("MODELCACHE_SOCKET", str(silent))
    before = time.monotonic()
    with pytest.raises(modelcache.DeadlineError):
        modelcache.open(path, timeout=0.1)
    assert time.monotonic() - before < SOON


def test_greeting_counts_for_the_deadline_of_the_tool(silent, path):
    before = time.monotonic()
    failed = run_ctl("--socket", silent, "load", path, "--timeout", "0.1", check=1)
    assert time.monotonic() - before < SOON
    assert failed.stderr.startswith("modelcachectl: ")


def test_calls_on_a_stopped_daemon_end_with_their_deadline(tmp_path, path):
    with Daemon(tmp_path / "d") as daemon, daemon.client() as client:
        client.open(path).close()
        with stopped(daemon.pid):
            before = time.monotonic()
            for method in ("why", "verify", "evict"):
                with pytest.raises(modelcache.DeadlineError):
                    client.call(method, model=str(path), timeout_ms=100)
            assert time.monotonic() - before < SOON
        eventually(lambda: daemon.status()["clients"] == 2, what="the answers")


def test_load_that_names_a_missing_file_starts_no_daemon(tmp_path):
    """The file is looked for before anything is started for it."""
    environment = client_environment(MODELCACHE_AUTOSTART="1", MODELCACHE_DAEMON="/bin/false")
    absent = tmp_path / "absent.safetensors"
    failed = run_ctl("--socket", tmp_path / "socket", "load", absent, environment=environment)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "absent.safetensors" in failed.stderr and "socket" not in failed.stderr
    assert [p.name for p in tmp_path.iterdir()] == []
