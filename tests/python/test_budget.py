"""The memory budget: least recently used goes first, what is in use or pinned does not."""

import re

import modelcache
import pytest

from cachetest.daemon import Daemon
from cachetest.files import sparse_st
from cachetest.waiting import eventually

MIB = 2**20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("budget"), "--memory-budget", "96MiB") as running:
        yield running


@pytest.fixture(autouse=True)
def empty(daemon):
    daemon.evict_all()  # the probe of the test before leaves a model
    yield
    daemon.evict_all()


@pytest.fixture
def paths(tmp_path):
    return [sparse_st(tmp_path / f"m{i}.safetensors", 30) for i in range(5)]


def resident(client):
    return {model["path"].rpartition("/")[2][1] for model in client.list()}


def test_least_recently_used_goes_first(client, daemon, paths):
    evictions = daemon.status()["evictions"]
    for path in paths[:3]:
        client.open(path).close()
    assert client.open(paths[0]).hit
    client.open(paths[3]).close()
    assert "1" not in resident(client) and {"0", "2", "3"} <= resident(client)
    assert daemon.status()["evictions"] == evictions + 1
    assert daemon.status()["resident_bytes"] <= 96 * MIB
    assert any(e["event"] == "evict" and e["reason"] for e in client.why(str(paths[1]))["history"])


def test_model_larger_than_the_budget_is_refused_with_both_numbers(
    client, daemon, tmp_path, refused
):
    client.open(sparse_st(tmp_path / "small.safetensors", 30)).close()
    entries = daemon.status()["entries"]
    path = sparse_st(tmp_path / "large.safetensors", 200)
    failure = refused(path, str(96 * MIB), status=("no_room",))
    assert isinstance(failure, MemoryError)
    needed = int(re.search(r"needs (\d+) bytes", str(failure)).group(1))
    assert 200 * MIB <= needed < 201 * MIB
    assert daemon.status()["entries"] == entries, "a hopeless load must not evict others"


def test_leases_hold_their_models(client, daemon, paths):
    held = [client.open(path) for path in paths[:3]]
    with pytest.raises(modelcache.NoRoomError):
        client.open(paths[3])
    assert len(held) == 3
    held[1].close()
    eventually(lambda: daemon.status()["leases"] == 2, what="the end of a lease")
    client.open(paths[3]).close()
    assert "1" not in resident(client)


def test_pins_hold_their_models(client, paths):
    client.open(paths[0], pin=True).close()
    for path in paths[1:]:
        client.open(path).close()
    assert "0" in resident(client)
    with pytest.raises(modelcache.InUseError, match="pin"):
        client.evict(str(paths[0]))
    client.unpin(str(paths[0]))
    client.evict(str(paths[0]))
    assert "0" not in resident(client)


def test_evicting_a_model_in_use_is_refused(client, paths):
    model = client.open(paths[0])
    with pytest.raises(modelcache.InUseError, match="lease"):
        client.evict(str(paths[0]))
    assert bytes(model.raw("t0")[:4]) == str(paths[0]).encode()[:4]


def test_evicted_model_loads_again(client, paths):
    first = client.open(paths[0])
    identity = first.model_id
    first.close()
    eventually(lambda: not client.list()[0]["leases"], what="the end of the lease")
    client.evict(str(paths[0]))
    again = client.open(paths[0])
    assert (again.hit, again.model_id) == (False, identity)
    assert "evict" in again.reason


def test_every_reason_is_kept(client, paths):
    client.open(paths[0]).close()
    client.open(paths[0]).close()
    eventually(lambda: not client.list()[0]["leases"], what="the end of the leases")
    client.evict(str(paths[0]))
    events = [event["event"] for event in client.why(str(paths[0]))["history"]]
    assert [e for e in events if e in ("miss", "load", "hit", "evict")] == [
        "miss",
        "load",
        "hit",
        "evict",
    ]
    assert client.why(str(paths[0]))["state"] == "absent"
