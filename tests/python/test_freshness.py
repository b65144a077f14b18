"""What a hit may be: the file as it is now, or nothing."""

import os
import signal
import struct

import modelcache
import pytest

from cachetest.files import GOOD, sharded, sparse_st
from cachetest.processes import Worker, exists
from cachetest.waiting import eventually


@pytest.fixture(autouse=True)
def empty(daemon):
    daemon.evict_all()


def good(first, second):
    return GOOD[:-8] + struct.pack("<2f", first, second)


def values(model):
    return model.raw("w").cast("f").tolist()


def test_overwritten_in_place_with_the_same_size_and_time(tmp_path, client):
    """F2: the change time cannot be set back."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    old = client.open(path)
    before = path.stat()
    path.write_bytes(good(5, 6))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    new = client.open(path)
    assert (values(new), new.hit) == ([5.0, 6.0], False)
    assert "chang" in new.reason or "differ" in new.reason, new.reason
    assert values(old) == [1.0, 2.0]


def test_replaced_by_rename(tmp_path, client):
    """F2"""
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    old = client.open(path)
    stat = path.stat()
    other = tmp_path / "other"
    other.write_bytes(good(5, 6))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)
    assert values(client.open(path)) == [5.0, 6.0]
    assert values(old) == [1.0, 2.0]


def test_many_writes_within_one_second(tmp_path, client):
    """F2: each write is followed at once by a load, far inside the clock tick of coarse times."""
    path = tmp_path / "m.safetensors"
    for n in range(12):
        path.write_bytes(good(n, n + 1))
        assert values(client.open(path)) == [n, n + 1]


def test_unchanged_file_is_a_hit_with_a_reason(tmp_path, client):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    first, second = client.open(path), client.open(path)
    assert (first.hit, second.hit) == (False, True)
    assert first.reason and second.reason and first.reason != second.reason


def test_superseded_version_goes_when_nobody_uses_it(tmp_path, client, daemon):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    client.open(path).close()
    entries = daemon.status()["entries"]
    path.write_bytes(good(5, 6))
    client.open(path).close()
    eventually(lambda: daemon.status()["entries"] <= entries, what="the end of the old version")


def test_deleted_file_is_no_such_file(tmp_path, client):
    """F3: as an uncached call; who has it keeps it, and it can be had by name while resident."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    held = client.open(path, name="kept-by-name")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="m.safetensors"):
        client.open(path)
    assert values(held) == [1.0, 2.0]
    assert values(client.resident("kept-by-name")) == [1.0, 2.0]


def test_deleted_folder_is_no_such_file(tmp_path, client):
    """F3"""
    folder = sharded(tmp_path / "m", {"a.safetensors": {"w": ("U8", [1], b"\x07")}})
    client.open(folder)
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        client.open(folder)


def test_broken_link_names_link_and_target(tmp_path, client):
    """F1, natively: a snapshot whose blob is gone."""
    link = tmp_path / "model.safetensors"
    link.symlink_to("../blobs/x1")
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        client.open(link)


def test_snapshots_over_blobs(tmp_path, client):
    """F1, natively: a blob is known by what it is, whatever snapshot it is reached through."""
    blobs, snapshots = tmp_path / "blobs", tmp_path / "snapshots"
    for folder in (blobs, snapshots / "aaa", snapshots / "bbb"):
        folder.mkdir(parents=True)
    (blobs / "x1").write_bytes(GOOD)
    (blobs / "x2").write_bytes(good(3, 4))
    (snapshots / "aaa" / "model.safetensors").symlink_to("../../blobs/x1")
    (snapshots / "bbb" / "model.safetensors").symlink_to("../../blobs/x2")
    assert values(client.open(snapshots / "aaa" / "model.safetensors")) == [1.0, 2.0]
    assert values(client.open(snapshots / "bbb" / "model.safetensors")) == [3.0, 4.0]
    again = client.open(snapshots / "aaa")
    assert (values(again), again.hit) == ([1.0, 2.0], True)
    direct = client.open(blobs / "x1")
    assert (values(direct), direct.hit) == ([1.0, 2.0], True)


# ---- interrupted loads --------------------------------------------------------------------------

OPEN = """
say("ready")
wait()
try:
    model = client.open(arguments["path"])
    say(["ok", bytes(model.raw("t0")[:8]).hex()])
except modelcache.Error as failure:
    say([failure.status, str(failure)])
"""


def caught_mid_load(daemon, worker, path):
    """Stops the loader that the worker's request starts; gives its pid."""
    worker.go()
    return daemon.stopped_loader(path)


@pytest.fixture
def large(tmp_path):
    return sparse_st(tmp_path / "large.safetensors", 256)


def test_killed_loaders_leave_nothing(daemon, large):
    """F4: the one who asked gets the error with the signal, twenty times; then a load succeeds."""
    before = daemon.resting_figures()
    for _ in range(20):
        with Worker(daemon, OPEN, path=large) as worker:
            worker.hear()
            pid = caught_mid_load(daemon, worker, large)
            os.kill(pid, signal.SIGKILL)
            status, message = worker.hear()
            assert status == "loader_failed" and "9" in message, (status, message)
            assert worker.finish() == 0
        daemon.comes_back_to(before)
        assert not exists(pid)
    with daemon.client() as client:
        expected = f"{large}:0".encode()[:8]
        assert bytes(client.open(large).raw("t0")[:8]) == expected


def test_client_killed_while_it_waits_stops_the_load(daemon, large):
    """F4"""
    before = daemon.resting_figures()
    with Worker(daemon, OPEN, path=large) as worker:
        worker.hear()
        pid = caught_mid_load(daemon, worker, large)
        worker.kill()
    eventually(lambda: not exists(pid), what="the end of the loader")
    daemon.comes_back_to(before)


def test_one_waiter_leaving_does_not_stop_the_others(daemon, large):
    before = daemon.resting_figures()

    def requests():
        status = daemon.status()
        return status["hits"] + status["misses"]

    asked = requests()
    with Worker(daemon, OPEN, path=large) as first, Worker(daemon, OPEN, path=large) as second:
        first.hear(), second.hear()
        pid = caught_mid_load(daemon, first, large)
        second.go()
        eventually(lambda: requests() == asked + 2, what="the second request")
        clients = daemon.status()["clients"]
        first.kill()
        eventually(lambda: daemon.status()["clients"] == clients - 1, what="the hang-up")
        assert exists(pid)
        os.kill(pid, signal.SIGCONT)
        assert second.hear()[0] == "ok"
    daemon.evict_all()
    daemon.comes_back_to(before)


def test_deadline_of_the_only_waiter_stops_the_load(daemon, large, client):
    before = daemon.resting_figures()
    code = """
    say("ready")
    wait()
    try:
        client.open(arguments["path"], timeout=1.0)
        say("ok")
    except TimeoutError as failure:
        say(failure.status)
    """
    with Worker(daemon, code, path=large) as worker:
        worker.hear()
        pid = caught_mid_load(daemon, worker, large)
        assert worker.hear() == "timeout"
        eventually(lambda: not exists(pid), what="the end of the loader")
        assert worker.finish() == 0
    daemon.comes_back_to(before)


def test_one_load_for_many_who_ask_at_once(daemon, tmp_path):
    path = sparse_st(tmp_path / "many.safetensors", 64)
    before = daemon.status()
    workers = [Worker(daemon, OPEN, path=path) for _ in range(8)]
    try:
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.go()
        assert [worker.hear()[0] for worker in workers] == ["ok"] * 8
    finally:
        for worker in workers:
            worker.__exit__()
    after = daemon.status()
    assert after["loads"] - before["loads"] == 1
    assert after["hits"] + after["misses"] - before["hits"] - before["misses"] == 8


def test_progress_can_give_up_the_load(daemon, tmp_path):
    """The load ends while its client stays connected: it was withdrawn, not merely orphaned."""
    path = sparse_st(tmp_path / "enough.safetensors", 1024)
    loads = daemon.status()["loads"]
    loaders = []

    class Enough(Exception):
        pass

    def stop(done, total):
        if not loaders:
            loaders.extend(daemon.loaders(path))
            for pid in loaders:
                os.kill(pid, signal.SIGSTOP)  # else it might finish before it is withdrawn
        raise Enough

    with daemon.client() as client:
        before = daemon.resting_figures()
        with pytest.raises(Enough):
            client.open(path, progress=stop)
        assert loaders, "no loader ran when its progress was told"
        eventually(lambda: not any(map(exists, loaders)), what="the end of the loader")
        daemon.comes_back_to(before)
        assert daemon.status()["loads"] == loads
        assert client.list() == []


def test_progress_reports_what_is_done(daemon, tmp_path):
    path = sparse_st(tmp_path / "progress.safetensors", 512)
    seen = []
    with daemon.client() as client:
        client.open(path, progress=lambda done, total: seen.append((done, total))).close()
    assert seen, "no progress in a load of 512 MiB"
    assert all(0 <= done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    daemon.evict_all()


def test_file_that_changes_while_it_is_read_is_refused(daemon, large):
    with Worker(daemon, OPEN, path=large) as worker:
        worker.hear()
        pid = caught_mid_load(daemon, worker, large)
        with open(large, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.kill(pid, signal.SIGCONT)
        status, message = worker.hear()
        assert status == "file_changed" and large.name in message
    assert isinstance(modelcache.FileChangedError("x"), modelcache.Error)


def test_file_cut_while_it_is_read_is_refused(daemon, large):
    """A mapped file that shrinks is SIGBUS for whoever reads it: an error, not a dead daemon."""
    with Worker(daemon, OPEN, path=large) as worker:
        worker.hear()
        pid = caught_mid_load(daemon, worker, large)
        os.truncate(large, 4096)
        os.kill(pid, signal.SIGCONT)
        status, message = worker.hear()
        assert status in ("file_changed", "bad_file", "loader_failed"), (status, message)
