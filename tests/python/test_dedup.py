"""Equal storages are stored once: within a model, across models, and no longer than needed."""

import json

import numpy as np
import pytest
import torch

from cachetest.files import st, st_tensors
from cachetest.waiting import eventually

KIB = 1024
generator = np.random.default_rng(9)


def blob(kib):
    return generator.bytes(kib * KIB)


def write(path, **tensors):
    path.write_bytes(st_tensors({n: ("U8", [len(d)], d) for n, d in tensors.items()}))
    return path


@pytest.fixture(autouse=True)
def empty(daemon):
    daemon.evict_all()
    yield
    daemon.evict_all()


def test_equal_storages_of_a_model_are_stored_once_and_written_apart(tmp_path, client, daemon):
    before = daemon.status()["arena_bytes"]
    same = blob(512)
    path = write(tmp_path / "m.safetensors", a=same, b=same, c=blob(64))
    model = client.open(path)
    assert daemon.status()["arena_bytes"] - before == 576 * KIB
    a, b = model["a"], model["b"]
    assert a.data_ptr() != b.data_ptr()
    a[0] = a[0] ^ 1
    assert a[0] != b[0] and bytes(b.numpy()) == same
    assert bytes(client.open(path).raw("a")) == same


def test_equal_small_storages_are_not_worth_it_but_right(tmp_path, client):
    same = blob(1)
    model = client.open(write(tmp_path / "m.safetensors", a=same, b=same))
    model["a"].zero_()
    assert bytes(model.raw("b")) == same


def test_tied_tensors_stay_tied(tmp_path, client, daemon):
    before = daemon.status()["arena_bytes"]
    weight = torch.arange(2**16, dtype=torch.float32)
    torch.save({"a": weight, "b": weight, "c": weight.clone()}, tmp_path / "m.pt")
    model = client.open(tmp_path / "m.pt")
    assert daemon.status()["arena_bytes"] - before == 2**18
    assert model["a"].data_ptr() == model["b"].data_ptr() != model["c"].data_ptr()
    model["a"][0] = -1
    assert (model["b"][0].item(), model["c"][0].item()) == (-1.0, 0.0)


def test_equal_storages_across_models_are_counted_once(tmp_path, client, daemon):
    before = daemon.status()["arena_bytes"]
    base = blob(4096)
    one = write(tmp_path / "one.safetensors", base=base, head=blob(128))
    two = write(tmp_path / "two.safetensors", base=base, other=blob(256))
    client.open(one).close()
    model = client.open(two)
    assert daemon.status()["arena_bytes"] - before == (4096 + 128 + 256) * KIB
    info = {m["name"]: m for m in client.list()}[str(two)]
    assert info["borrowed_bytes"] == 4096 * KIB
    assert bytes(model.raw("base")) == base
    assert client.verify(str(two))["ok"]


def test_shared_arena_stays_while_anyone_needs_it(tmp_path, client, daemon):
    base = blob(4096)
    one = write(tmp_path / "one.safetensors", base=base, head=blob(128))
    two = write(tmp_path / "two.safetensors", base=base, other=blob(256))
    before = daemon.resting_figures()
    client.open(one).close()
    client.open(two).close()
    client.evict(str(one))
    again = client.open(two)
    assert again.hit and bytes(again.raw("base")) == base
    again.close()
    eventually(lambda: daemon.figures()["leases"] == before["leases"], what="the end of the lease")
    client.evict(str(two))
    daemon.comes_back_to(before)


def test_models_that_share_are_written_apart(tmp_path, client):
    base = blob(1024)
    one = client.open(write(tmp_path / "one.safetensors", base=base))
    two = client.open(write(tmp_path / "two.safetensors", base=base, more=blob(64)))
    one["base"].zero_()
    assert bytes(two.raw("base")) == base


def test_same_file_twice_on_disk_is_stored_once(tmp_path, client, daemon):
    before = daemon.status()["arena_bytes"]
    content = blob(2048)
    first = client.open(write(tmp_path / "a.safetensors", w=content))
    second = client.open(write(tmp_path / "b.safetensors", w=content))
    assert (second.hit, first.model_id != second.model_id) == (False, True)
    assert daemon.status()["arena_bytes"] - before == 2048 * KIB
    assert bytes(second.raw("w")) == content


def test_almost_equal_storages_are_kept_apart(tmp_path, client):
    """Equal size and equal samples, one byte differs in the middle: comparing decides."""
    content = bytearray(blob(1024))
    one = write(tmp_path / "one.safetensors", w=bytes(content))
    content[300 * KIB + 123] ^= 0xFF
    two = write(tmp_path / "two.safetensors", w=bytes(content))
    first, second = client.open(one), client.open(two)
    assert bytes(second.raw("w")) == bytes(content) != bytes(first.raw("w"))


def test_zeros_of_many_sizes(tmp_path, client, daemon):
    before = daemon.status()["arena_bytes"]
    header, offset = {}, 0
    for i in range(20):
        header[f"z{i}"] = {
            "dtype": "U8",
            "shape": [2**20],
            "data_offsets": [offset, offset + 2**20],
        }
        offset += 2**20
    path = tmp_path / "z.safetensors"
    path.write_bytes(st(json.dumps(header), bytes(offset)))
    model = client.open(path)
    assert daemon.status()["arena_bytes"] - before == 2**20
    model["z3"][5] = 1
    assert sum(int(t.sum()) for t in model.values()) == 1
