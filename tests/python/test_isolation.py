"""Writes stay in their process; reads share memory; nothing lives longer or shorter than needed."""

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch

from cachetest.daemon import memory_of
from cachetest.files import sha256, st_tensors
from cachetest.processes import Worker, ask
from cachetest.waiting import eventually

MIB = 2**20


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """64 MiB: a layer of 16 MiB and one of 48 MiB, no two pages equal."""
    path = tmp_path_factory.mktemp("isolation") / "m.safetensors"
    content = np.random.default_rng(1).standard_normal(16 * MIB, dtype=np.float32)
    first, second = content[: 4 * MIB].tobytes(), content[4 * MIB :].tobytes()
    path.write_bytes(
        st_tensors({"a": ("F32", [2048, 2048], first), "b": ("F32", [4096, 3072], second)})
    )
    return path


DIGEST = """
import hashlib
model = client.open(arguments["path"])
def digests():
    return [hashlib.sha256(model.raw(name)).hexdigest() for name in ("a", "b")]
"""


def expected(path):
    data = path.read_bytes()
    return [sha256(data[-64 * MIB : -48 * MIB]), sha256(data[-48 * MIB :])]


def test_in_place_writes_are_seen_by_their_process_alone(daemon, model_path):
    """D10"""
    file_before = sha256(model_path.read_bytes())
    original = expected(model_path)
    read = DIGEST + "say(digests())\nwait()\nsay(digests())"
    write = (
        DIGEST
        + """
def private():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
digests()
before = private()
a, b = model["a"], model["b"]
slice_before, layer_before = a[:1, :1024].clone(), a[1:].clone()
import_cost = private()
a[0, :1024].add_(1)                       # 4 KiB
after_slice = private()
b.add_(1)                                 # a whole layer
after_layer = private()
ok = bool((a[:1, :1024] == slice_before + 1).all()) and bool((a[1:] == layer_before).all())
say([ok, after_slice - import_cost, after_layer - after_slice, digests()])
wait()
"""
    )
    with Worker(daemon, read, path=model_path) as b, Worker(daemon, write, path=model_path) as a:
        assert b.hear() == original
        ok, slice_cost, layer_cost, changed = a.hear()
        assert ok
        assert slice_cost < MIB
        assert 47 * MIB <= layer_cost < 56 * MIB
        assert changed != original
        b.go()
        assert b.hear() == original
        assert ask(daemon, DIGEST + "say(digests())", path=model_path) == original
        assert a.finish() == 0 and b.finish() == 0
    assert sha256(model_path.read_bytes()) == file_before
    with daemon.client() as client:
        assert client.verify(str(model_path))["ok"]


def test_eight_processes_hold_one_copy(daemon, model_path):
    """Sum of the proportional memory of eight readers, the interpreters' own left out."""
    code = """
    def proportional():
        for line in open("/proc/self/smaps_rollup"):
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    import hashlib
    hashlib.sha256()
    say("ready")
    wait()
    empty = proportional()
    say(empty)
    wait()
    model = client.open(arguments["path"])
    total = sum(hashlib.sha256(model.raw(n)).digest()[0] for n in model)
    say(total)
    wait()
    say(proportional() - empty)
    wait()
    """
    with daemon.client() as client:
        client.open(model_path).close()
    workers = [Worker(daemon, code, path=model_path) for _ in range(8)]
    try:
        steps = []
        for _ in range(4):
            steps.append([worker.hear() for worker in workers])
            for worker in workers:
                worker.go()
        added = sum(steps[3])
    finally:
        for worker in workers:
            worker.__exit__()
    assert len(set(steps[2])) == 1
    assert added <= 1.05 * 64 * MIB, f"eight readers add {added / MIB:.1f} MiB to 64 MiB"


def test_models_of_one_process_do_not_see_each_others_writes(client, model_path):
    one, two = client.open(model_path), client.open(model_path)
    one["a"][0, 0] = 5.5
    assert two["a"][0, 0] != 5.5
    assert one["a"] is one["a"] and one["a"][0, 0] == 5.5


def test_slices_keep_the_memory_alive(daemon, client, model_path):
    leases = daemon.status()["leases"]
    model = client.open(model_path)
    piece = model["a"][10:12, 5].clone(), model["a"][10:12, 5]
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    assert torch.equal(*piece)
    assert daemon.status()["leases"] == leases + 1
    del piece
    gc.collect()
    eventually(lambda: daemon.status()["leases"] == leases, what="the end of the lease")


def test_numpy_and_raw_views_keep_the_memory_alive(daemon, client, model_path):
    leases = daemon.status()["leases"]
    array = client.open(model_path)["a"].numpy()
    raw = client.open(model_path).raw("a")
    gc.collect()
    assert array.tobytes() == raw.tobytes()
    assert daemon.status()["leases"] == leases + 2
    del array, raw
    gc.collect()
    eventually(lambda: daemon.status()["leases"] == leases, what="the end of the leases")


def test_closing_a_model_leaves_its_tensors(client, model_path):
    with client.open(model_path) as model:
        tensor = model["a"]
    value = tensor[0, 0].item()
    gc.collect()
    assert tensor[0, 0].item() == value
    with pytest.raises(ValueError, match="closed"):
        model["b"]


def test_closing_the_client_leaves_its_models(daemon, model_path):
    client = daemon.client()
    model = client.open(model_path)
    client.close()
    assert model["a"].shape == (2048, 2048)
    with pytest.raises(ValueError, match="closed"):
        client.status()


def test_threads_build_one_set_of_tensors(client, model_path):
    model = client.open(model_path)
    barrier = threading.Barrier(8)
    seen = []

    def build():
        barrier.wait()
        seen.append((model["a"], dict(model.items())["b"]))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(a) for a, _ in seen}) == len({id(b) for _, b in seen}) == 1


def test_growing_a_tensor_never_reads_past_the_map(client, tmp_path):
    """D9, natively: the storage refuses to grow, as stock's over foreign memory does.

    That the tensor's shape has changed by then is a known limit (docs/architecture.md).
    """
    path = tmp_path / "four.safetensors"
    path.write_bytes(st_tensors({"t": ("F32", [4], np.arange(4, dtype=np.float32).tobytes())}))
    tensor = client.open(path)["t"]
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(400)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100)
    assert tensor.untyped_storage().nbytes() == 16
    tensor.resize_(2)
    assert tensor.tolist() == [0.0, 1.0]


def test_daemon_is_small_and_stays_small(daemon, client, model_path):
    """The model is the kernel's memory, not the daemon's."""
    client.open(model_path).close()
    assert memory_of(daemon.pid, "Rss") < 24 * MIB
    assert memory_of(daemon.pid, "Private_Dirty") < 10 * MIB


def test_nothing_of_a_client_maps_the_file(client, model_path):
    model = client.open(model_path)
    model["a"].sum()
    with open("/proc/self/maps") as maps:
        assert str(model_path) not in maps.read()
    assert os.path.samefile(model_path, model_path)


def test_tensors_that_come_in_bulk_are_those_that_come_alone(client, tmp_path):
    """The quick way for all and the way for one give equal tensors over their own storages."""
    path = tmp_path / "both.pt"
    shared = torch.arange(6.0)
    values = {f"t{i}": torch.full((i % 3 + 1, 5), float(i)) for i in range(40)}
    values.update(
        transposed=torch.arange(6.0).reshape(2, 3).t(),
        left=shared[:3],
        right=shared[3:],
        empty=torch.empty(0, 4),
        scalar=torch.tensor(5),
        part=torch.zeros(100)[:7],
        eight=torch.ones(3).to(torch.float8_e4m3fn),
        flag=torch.tensor([True, False]),
        grad=torch.ones(2, requires_grad=True),
    )
    torch.save(values, path)
    alone = {name: client.open(path)[name] for name in values}
    bulk = client.open(path).state_dict()
    for name, expected in values.items():
        for tensor in (alone[name], bulk[name]):
            assert (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) == (
                expected.dtype,
                expected.shape,
                expected.stride(),
                expected.storage_offset(),
            ), name
            assert torch.equal(tensor.float(), expected.float()), name
            assert tensor.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), name
            assert tensor.requires_grad == expected.requires_grad
            assert tensor._is_view() is False, name
    assert bulk["left"].untyped_storage()._cdata == bulk["right"].untyped_storage()._cdata


def test_last_tensor_of_a_bulk_ends_the_lease(daemon, client, model_path):
    leases = daemon.status()["leases"]
    tensors = list(client.open(model_path).values())
    last = tensors.pop()[:1]
    del tensors
    gc.collect()
    assert daemon.status()["leases"] == leases + 1
    del last
    gc.collect()
    eventually(lambda: daemon.status()["leases"] == leases, what="the end of the lease")
