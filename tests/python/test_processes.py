"""What the daemon is, forks and threads of its clients, restarts."""

import os
import re
import struct
from pathlib import Path

import pytest

from cachetest.daemon import (
    Daemon,
    memory_of,
    open_descriptors,
)
from cachetest.files import GOOD, st, st_tensors
from cachetest.limits import pid_namespace
from cachetest.processes import Worker, ask
from cachetest.waiting import eventually
from cachetest.wire import EVENT, OPEN

MIB = 2**20


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


# ---- G9, G10, G11: what the daemon is ------------------------------------------------------------


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


# ---- G12: fork -----------------------------------------------------------------------------------


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


# ---- daemon restart ------------------------------------------------------------------------------


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
