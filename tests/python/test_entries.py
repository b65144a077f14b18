"""Python calls as entries, made by a tiny loader: what clients get, and what when things go wrong."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import modelcache
import pytest
import torch
from modelcache import _entry

from cachetest.calls import HELLO, LOADER, TEXT, fifo_at, fresh_key, in_thread, let_go, make
from cachetest.daemon import Daemon, children, ctl_json
from cachetest.files import st_tensors
from cachetest.processes import PACKAGE, Worker, client_environment, exists
from cachetest.waiting import eventually
from cachetest.wire import ERROR, OPEN, REPLY, Raw, frame

ALL_SEALS = 0xF  # F_SEAL_SEAL, SHRINK, GROW, WRITE


def refused_open(daemon, body, descriptors):
    """The error that the daemon answers an open with, spoken by hand."""
    with Raw(daemon.socket) as peer:
        peer.send(frame(OPEN, body, fds=len(descriptors)), descriptors)
        _, flags, reply, _ = peer.receive()
        assert flags == REPLY | ERROR, reply
        return reply


# ---- what comes out ------------------------------------------------------------------------------


def test_absent_call_is_none_and_a_made_one_is_found(client):
    key = fresh_key()
    assert _entry.find(client, key) is None
    made = make(client, key, HELLO, ["storage", "0102"], ["commit", {"python": {"stream": 0}}])
    assert (made.hit, made.reason, made.storage_count) == (False, "never loaded", 2)
    assert made.metadata == {"python": {"stream": 0}}
    found = _entry.find(client, key)
    assert (found.hit, found.model_id, found.name) == (True, made.model_id, made.name)
    assert bytes(found.raw(0)) == TEXT
    assert bytes(found.storage(1)) == b"\x01\x02"
    assert found.load_seconds > 0


def test_second_make_is_a_hit_without_a_loader(client, tmp_path):
    key, runs = fresh_key(), tmp_path / "runs"
    steps = [["append", str(runs), "run"], HELLO, ["commit", {}]]
    first = make(client, key, *steps)
    second = make(client, key, *steps)
    assert (second.hit, second.model_id) == (True, first.model_id)
    assert runs.read_text() == "run\n"


def test_many_askers_share_one_load(daemon, client, tmp_path):
    key, runs, fifo = fresh_key(), tmp_path / "runs", fifo_at(tmp_path / "fifo")
    steps = [["append", str(runs), "run"], ["open", fifo], HELLO, ["commit", {}]]
    joined = daemon.status()["misses"] + 5

    def ask():
        with daemon.client() as other:
            return make(other, key, *steps)

    with contextlib.ExitStack() as stack:
        results = [stack.enter_context(in_thread(ask)) for _ in range(5)]
        eventually(lambda: daemon.status()["misses"] == joined, what="five that wait")
        let_go(fifo)
    entries = [result for (result,) in results]
    assert {bytes(entry.raw(0)) for entry in entries} == {TEXT}
    assert len({entry.model_id for entry in entries}) == 1
    assert sum("joined" in entry.reason for entry in entries) == 4
    assert runs.read_text() == "run\n"


def test_storages_of_all_sizes(client):
    sizes = [0, 1, 63, 64, 4096, 3 * 2**20 + 5]
    steps = [["storage", f"{i:02x}", size] for i, size in enumerate(sizes)]
    entry = make(client, fresh_key(), *steps, ["commit", {}])
    for i, size in enumerate(sizes):
        assert bytes(entry.raw(i)) == bytes([i]) * size
        assert bytes(entry.storage(i)) == bytes([i]) * size


def test_large_payload_arrives_whole(client):
    text = "x" * (3 * 2**20)
    entry = make(client, fresh_key(), ["append", "/dev/null", text], HELLO, ["commit", {}])
    assert bytes(entry.raw(0)) == TEXT


def test_named_tensors_are_listed(daemon, client):
    key = fresh_key()
    table = [
        ["tensor", "a.weight", "float32", [2, 3], [3, 1], 0, 8, 9],
        ["tensor", "a.meta", "bfloat16", [4], [1], None],
        ["tensor", "a.odd", "uint3", [4], [1], 0],  # no type of ours: left out
    ]
    make(client, key, ["storage", "00", 32], *table, ["commit", {}]).close()
    shown = ctl_json(daemon, "show", f"call:{key}")
    rows = {row["name"]: row for row in shown["tensors"]}
    assert set(rows) == {"a.weight", "a.meta"}
    assert rows["a.weight"]["shape"] == [2, 3] and rows["a.weight"]["offset"] == 8
    assert shown["format"] == "python"


@pytest.mark.parametrize(
    "row, what",
    [
        (["t", "float32", [9], [1], 0], "t"),
        (["t", "float32", [1], [1], 7], "t"),
        (["t", "float32", [-1], [1], 0], "t"),
    ],
)
def test_a_tensor_outside_of_its_storage_is_found_before_memory_is_asked_for(
    daemon, client, row, what
):
    before = daemon.resting_figures()
    with pytest.raises(modelcache.LoaderFailedError, match="BadFileError"):
        make(client, fresh_key(), ["storage", "00", 32], ["tensor", *row], ["commit", {}])
    daemon.comes_back_to(before)


# ---- memory --------------------------------------------------------------------------------------


def test_equal_storages_are_stored_once_and_written_apart(daemon, client):
    before = daemon.status()["arena_bytes"]
    same = os.urandom(512).hex()
    entry = make(client, fresh_key(), *[["storage", same, 256]] * 2, ["commit", {}])
    assert daemon.status()["arena_bytes"] - before == 2**17
    one, two = entry.storage(0), entry.storage(1)
    assert one.data_ptr() != two.data_ptr()
    one[0] = one[0] ^ 1
    assert one[0] != two[0] and bytes(two) == bytes.fromhex(same) * 256


def test_storages_that_a_file_model_holds_are_borrowed(daemon, client, tmp_path):
    content = os.urandom(1024)
    path = tmp_path / "m.safetensors"
    path.write_bytes(st_tensors({"w": ("U8", [2**20], content * 1024)}))
    with client.open(path) as model:
        before = daemon.status()["arena_bytes"]
        entry = make(client, fresh_key(), ["storage", content.hex(), 1024], ["commit", {}])
        assert daemon.status()["arena_bytes"] == before
        entry.storage(0)[0] = 1 ^ content[0]
        assert bytes(model.raw("w")[:1024]) == content


def test_edits_stay_in_their_entry_and_dirty_tells(client):
    key = fresh_key()
    one = make(client, key, ["storage", "07", 2**21], ["commit", {}])
    two = _entry.find(client, key)
    view = torch.empty(0, dtype=torch.uint8).set_(one.storage(0))
    assert int(view.sum(dtype=torch.int64)) == 7 * 2**21  # reading is no edit
    assert (one.dirty(), two.dirty()) == (False, False)
    view[2**20] = 9
    assert (one.dirty(), two.dirty()) == (True, False)
    assert two.raw(0)[2**20] == 7
    assert bytes(_entry.find(client, key).raw(0)[2**20 : 2**20 + 1]) == b"\x07"


def test_dirty_sees_edits_of_storages_with_a_map_of_their_own(client):
    entry = make(client, fresh_key(), *[["storage", "07", 2**17]] * 2, ["commit", {}])
    entry.storage(1)[3] = 1
    assert entry.dirty()


def test_raw_is_read_only_and_storages_outlive_their_entry(client):
    entry = make(client, fresh_key(), ["storage", "07", 4096], ["commit", {}])
    with pytest.raises(TypeError):
        entry.raw(0)[0] = 1
    storage, raw = entry.storage(0), entry.raw(0)
    entry.close()
    del entry
    assert bytes(storage) == bytes(raw) == b"\x07" * 4096


def test_lease_ends_with_the_last_storage(daemon, client):
    leases = daemon.status()["leases"]
    entry = make(client, fresh_key(), ["storage", "07", 4096], ["commit", {}])
    storage = entry.storage(0)
    del entry
    assert daemon.status()["leases"] == leases + 1
    del storage
    eventually(lambda: daemon.status()["leases"] == leases, what="the end of the lease")


# ---- out of date ---------------------------------------------------------------------------------


def test_stale_entry_is_superseded_and_its_leases_live_on(daemon, client):
    key = fresh_key()
    old = make(client, key, ["storage", "01", 4096], ["commit", {}])
    new = make(
        client,
        key,
        ["storage", "02", 4096],
        ["commit", {}],
        stale=old.model_id,
        stale_reason="config.json changed",
    )
    assert (new.hit, new.reason) == (False, "config.json changed")
    assert new.model_id != old.model_id
    assert bytes(_entry.find(client, key).raw(0)[:1]) == b"\x02"
    assert bytes(old.raw(0)[:1]) == b"\x01" and bytes(old.storage(0)[:1]) == b"\x01"
    entries = daemon.status()["entries"]
    old_storages = old.model_id
    old.close()
    del old
    eventually(lambda: daemon.status()["entries"] == entries - 1, what="the end of the stale entry")
    assert old_storages not in {model["id"] for model in client.list()}


def test_stale_entry_that_somebody_replaced_already_is_a_hit(client):
    key = fresh_key()
    old = make(client, key, HELLO, ["commit", {}])
    new = make(client, key, HELLO, ["commit", {}], stale=old.model_id)
    again = make(client, key, ["raise", "no second load"], stale=old.model_id)
    assert (again.hit, again.model_id) == (True, new.model_id)


def test_pin_passes_to_the_entry_that_supersedes(client):
    key = fresh_key()
    old = make(client, key, HELLO, ["commit", {}], pin=True)
    make(client, key, HELLO, ["commit", {}], stale=old.model_id)
    pinned = {m["id"]: m["pinned"] for m in client.list() if m["path"] == f"call:{key}"}
    assert sorted(pinned.values()) == [False, True] and not pinned[old.model_id]
    client.unpin(f"call:{key}")


def test_evicted_entry_is_a_miss_with_the_reason(client):
    key = fresh_key()
    make(client, key, HELLO, ["commit", {}]).close()
    eventually(lambda: not any(m["leases"] for m in client.list()), what="the end of the lease")
    client.evict(f"call:{key}")
    assert _entry.find(client, key) is None
    assert "evicted" in make(client, key, HELLO, ["commit", {}]).reason


# ---- failures ------------------------------------------------------------------------------------


def test_uncacheable_is_remembered_until_it_is_evicted(daemon, client, tmp_path):
    key, runs = fresh_key(), tmp_path / "runs"
    steps = [["append", str(runs), "run"], ["fail", "unsupported", "unet.hooks[3]: a lock"]]
    before = daemon.resting_figures()
    for _ in range(2):
        with pytest.raises(modelcache.UnsupportedError, match=r"unet\.hooks\[3\]: a lock"):
            make(client, key, *steps)
    with pytest.raises(modelcache.UnsupportedError, match=r"unet\.hooks\[3\]: a lock"):
        _entry.find(client, key)
    assert runs.read_text() == "run\n"
    daemon.comes_back_to(before)
    client.evict(f"call:{key}")
    assert _entry.find(client, key) is None
    assert bytes(make(client, key, HELLO, ["commit", {}]).raw(0)) == TEXT


def test_failure_reaches_every_waiter_with_its_detail_and_is_not_kept(daemon, client, tmp_path):
    key, fifo = fresh_key(), fifo_at(tmp_path / "fifo")
    detail = b"\0pickled \xff exception" * 100
    steps = [["open", fifo], ["fail", "loader_failed", "OSError: no such repo", detail.hex()]]
    waiting = daemon.status()["misses"] + 2
    with in_thread(lambda: make(client, key, *steps)) as one:
        with in_thread(lambda: make(client, key, *steps)) as two:
            eventually(lambda: daemon.status()["misses"] == waiting, what="two that wait")
            let_go(fifo)
    for (failure,) in (one, two):
        assert isinstance(failure, modelcache.LoaderFailedError)
        assert "OSError: no such repo" in str(failure) and failure.detail == detail
    assert bytes(make(client, key, HELLO, ["commit", {}]).raw(0)) == TEXT
    assert "pickled" not in daemon.log()
    history = client.why(f"call:{key}")["history"]
    assert [e["event"] for e in history] == ["miss", "failed", "miss", "load"]
    assert "OSError" in history[2]["reason"]


def test_detail_over_its_limit_is_left_out(client):
    for size, expected in ((256 << 10, 256 << 10), ((256 << 10) + 1, 0)):
        with pytest.raises(modelcache.LoaderFailedError, match="too much") as caught:
            make(client, fresh_key(), ["fail", "loader_failed", "too much", "00" * size])
        assert len(caught.value.detail) == expected


@pytest.mark.parametrize(
    "steps, what",
    [
        ([["kill", signal.SIGKILL]], "killed by signal 9"),
        ([["kill", signal.SIGSEGV]], "killed by signal 11"),
        ([["exit", 0]], "ended without a result"),
        ([["print", "last words"], ["exit", 7]], "status 7; it printed: last words"),
        ([["raise", "out of luck"]], "RuntimeError: out of luck"),
        ([HELLO, ["commit", {}], ["kill", signal.SIGKILL]], None),
    ],
)
def test_end_of_the_loader(daemon, client, steps, what):
    key = fresh_key()
    before = daemon.resting_figures()
    if what is None:  # what is committed stays
        assert bytes(make(client, key, *steps).raw(0)) == TEXT
        return
    with pytest.raises(modelcache.LoaderFailedError) as caught:
        make(client, key, *steps)
    assert what in str(caught.value)
    daemon.comes_back_to(before)
    assert _entry.find(client, key) is None


def test_load_that_nobody_waits_for_is_killed_with_its_children(daemon, tmp_path):
    fifo, pids = fifo_at(tmp_path / "fifo"), tmp_path / "pids"
    before = daemon.resting_figures()
    code = """
    from modelcache import _entry
    say("ready")
    payload = arguments["payload"].encode()
    _entry.make(client, arguments["key"], **arguments["call"], payload=payload)
    """
    steps = [["spawn", str(pids)], ["open", fifo], HELLO, ["commit", {}]]
    call = {
        "name": "f",
        "arguments": [sys.executable, str(LOADER)],
        "environment": client_environment(),
        "folder": "/",
    }
    with Worker(daemon, code, key=fresh_key(), call=call, payload=json.dumps(steps)) as worker:
        worker.hear()
        eventually(lambda: pids.exists() and pids.read_text().endswith("\n"), what="the loader")
        loaders = children(daemon.pid)
        worker.kill()
    pid = int(pids.read_text())
    eventually(lambda: not any(map(exists, [pid, *loaders])), what="the end of all")
    daemon.comes_back_to(before)


def test_deadline_and_progress(daemon, client, tmp_path):
    fifo = fifo_at(tmp_path / "fifo")
    before = daemon.resting_figures()
    with pytest.raises(TimeoutError):
        make(client, fresh_key(), ["open", fifo], timeout=0.2)
    daemon.comes_back_to(before)
    seen = []

    def progress(done, total):
        seen.append((done, total))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(client, fresh_key(), ["progress", 3, 9], ["open", fifo], progress=progress)
    assert seen == [(3, 9)]
    daemon.comes_back_to(before)


def test_without_room_nothing_is_made(tmp_path):
    with Daemon(tmp_path / "d", "--memory-budget", "4MiB") as daemon, daemon.client() as client:
        before = daemon.figures()
        with pytest.raises(MemoryError, match="4194304"):
            make(client, fresh_key(), ["storage", "00", 8 * 2**20], ["commit", {}])
        daemon.comes_back_to(before)
        assert bytes(make(client, fresh_key(), HELLO, ["commit", {}]).raw(0)) == TEXT


@pytest.mark.parametrize(
    "changes, error, what",
    [
        ({"arguments": ["/no/such/python"]}, modelcache.LoaderFailedError, "/no/such/python"),
        ({"folder": "/no/such/folder"}, modelcache.LoaderFailedError, "/no/such/folder"),
        ({"arguments": ["python"]}, modelcache.InvalidArgumentError, "absolute"),
        ({"arguments": []}, modelcache.InvalidArgumentError, "absolute"),
        ({"folder": "here"}, modelcache.InvalidArgumentError, "absolute"),
        ({"environment": {"": "x"}}, modelcache.InvalidArgumentError, "NAME=value"),
        ({"environment": {"A": "x" * 2**17}}, modelcache.InvalidArgumentError, "NAME=value"),
        ({"arguments": ["/bin/true"] * 257}, modelcache.Error, "limits 256"),
        ({"name": "x" * 4097}, modelcache.InvalidArgumentError, "too long"),
        ({"environment": {f"V{i}": "x" * 99999 for i in range(11)}}, modelcache.Error, "limit"),
        ({"stale": "x"}, modelcache.InvalidArgumentError, "option"),
        ({"arguments": ["/bin/\udcff"]}, modelcache.UnsupportedError, "UTF-8"),
    ],
)
def test_what_cannot_be_started(daemon, client, changes, error, what):
    before = daemon.resting_figures()
    with pytest.raises(error, match=what):
        make(client, fresh_key(), HELLO, ["commit", {}], **changes)
    daemon.comes_back_to(before)


def test_bad_keys_are_refused(client):
    for key in ("", "abc", "g" * 32, "0" * 33):
        with pytest.raises(modelcache.InvalidArgumentError):
            _entry.find(client, key)


# ---- the loader's surroundings -------------------------------------------------------------------


def test_loader_runs_where_and_as_it_is_told(daemon, client, tmp_path):
    state = tmp_path / "state"
    environment = {**client_environment(), "ODD": "a=b", "BAD": "\udcff", "MODELCACHE_SOCKET": "/x"}
    make(
        client,
        fresh_key(),
        ["environment", str(state)],
        HELLO,
        ["commit", {}],
        arguments=[sys.executable, str(LOADER), "one", "two words"],
        environment=environment,
        folder=str(tmp_path),
    )
    found = json.loads(state.read_text())
    assert found["arguments"] == ["one", "two words"]
    assert found["folder"] == str(tmp_path)
    variables = found["variables"]
    assert variables["ODD"] == "a=b" and "BAD" not in variables
    assert variables["MODELCACHE_SOCKET"] == daemon.socket
    assert variables["MODELCACHE_AUTOSTART"] == "0"
    assert found["descriptors"] == ["0", "1", "2", "3", "4"]  # the job and its payload


def test_payload_that_can_still_change_is_refused(daemon):
    body = {"call": {"key": "0" * 32, "arguments": ["/bin/true"], "folder": "/"}}
    memfd = os.memfd_create("payload", os.MFD_ALLOW_SEALING)
    with open("/dev/null", "rb") as null:
        for descriptors in ([memfd], [null.fileno()], []):
            assert refused_open(daemon, body, descriptors)["code"] == 1
    os.close(memfd)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_user_may_have_nothing_made_and_trusts_no_foreign_daemon(tmp_path):
    """Root, whom a user's daemon serves, is still another user than the one the loader would be."""
    user = 65534
    folder = tmp_path / "theirs"
    folder.mkdir()
    for parent in (tmp_path, *tmp_path.parents):
        with contextlib.suppress(PermissionError):
            if parent != Path("/"):
                parent.chmod(parent.stat().st_mode | 0o011)
    os.chown(folder, user, user)
    prefix = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"]
    key = fresh_key()
    with Daemon(folder, prefix=prefix) as daemon, daemon.client() as client:
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            make(client, key, HELLO, ["commit", {}])
        with pytest.raises(PermissionError, match="belongs to user 65534"):
            _entry.find(client, key)
        payload = os.memfd_create("payload", os.MFD_ALLOW_SEALING)
        fcntl.fcntl(payload, fcntl.F_ADD_SEALS, ALL_SEALS)
        body = {"call": {"key": key, "arguments": ["/bin/true"], "folder": "/"}}
        assert refused_open(daemon, body, [payload])["code"] == 7
        os.close(payload)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a mount namespace")
def test_daemon_that_sees_other_files_is_not_asked(tmp_path):
    with Daemon(tmp_path / "d", prefix=["unshare", "--mount"]) as daemon:
        with daemon.client() as client:
            with pytest.raises(modelcache.UnsupportedError, match="container"):
                make(client, fresh_key(), HELLO, ["commit", {}])


def test_job_is_only_taken_from_a_daemon(tmp_path):
    with open("/dev/null", "rb") as null:
        done = subprocess.run(
            [sys.executable, str(LOADER)],
            env=client_environment(),
            stdin=null,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1 and "InvalidArgumentError" in done.stderr


# ---- lists ---------------------------------------------------------------------------------------


def test_ctl_lists_shows_explains_verifies_and_evicts(daemon, client):
    key = fresh_key()
    name = "transformers:LlamaForCausalLM.from_pretrained('tiny', dtype=float16)"
    make(client, key, ["storage", "05", 2**17], ["commit", {"python": {}}], name=name).close()
    (listed,) = [m for m in ctl_json(daemon, "list")["models"] if m["path"] == f"call:{key}"]
    assert (listed["name"], listed["format"], listed["state"]) == (name, "python", "resident")
    assert " LlamaFor" in daemon.ctl("list", check=0).stdout  # the module is left out
    for model in (f"call:{key}", name, listed["id"]):
        assert ctl_json(daemon, "show", model)["name"] == name
        assert ctl_json(daemon, "why", model)["state"] == "resident"
    verified = ctl_json(daemon, "verify", f"call:{key}")
    assert (verified["ok"], verified["disk"]) == (True, "unavailable")
    eventually(lambda: not any(m["leases"] for m in client.list()), what="the end of the lease")
    daemon.ctl("evict", name, check=0)
    assert _entry.find(client, key) is None
    assert "evicted" not in ctl_json(daemon, "why", f"call:{key}")["state"]


def test_package_imports_nothing_heavy_for_entries():
    code = f"""
import sys
sys.path.insert(0, {str(PACKAGE)!r})
from modelcache import _entry, _fill
assert not {{"torch", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=client_environment())
