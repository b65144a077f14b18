"""The Python package itself: what it imports, what it raises, how it behaves as a mapping."""

import collections
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import modelcache
import pytest
from modelcache import _ffi, _structure

from cachetest.files import GOOD, st_tensors
from cachetest.processes import ask, client_environment
from cachetest.waiting import eventually


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


def test_nothing_heavy_is_imported_before_a_tensor(daemon, path):
    code = """
    model = client.open(arguments["path"])
    light = [m for m in ("torch", "numpy", "safetensors") if m in sys.modules]
    table = [list(row) for row in model.tensors()]
    still = "torch" in sys.modules
    value = model["w"].tolist()
    say([light, table, still, value, "torch" in sys.modules])
    """
    light, table, still, value, after = ask(daemon, code, path=path)
    assert (light, still, value, after) == ([], False, [1.0, 2.0], True)
    assert table == [["w", "float32", [2], [1], 0, 8, 0, 8, False]]


def test_module_functions_use_the_socket_of_the_environment(daemon, path):
    code = """
    import os
    os.environ["MODELCACHE_SOCKET"] = arguments["socket"]
    model = modelcache.open(arguments["path"], name="named")
    names = [entry["name"] for entry in modelcache.list()]
    modelcache.pin("named")
    modelcache.unpin("named")
    checked = modelcache.verify("named")["ok"]
    history = [event["event"] for event in modelcache.why("named")["history"]]
    model.close()
    say([modelcache.status()["daemon_pid"], "named" in names, checked, history[0]])
    """
    assert ask(daemon, code, path=path) == [daemon.pid, True, True, "miss"]


def test_model_is_a_mapping(client, path):
    model = client.open(path)
    assert isinstance(model, Mapping)
    assert (len(model), list(model), "w" in model, "v" in model) == (1, ["w"], True, False)
    assert list(model.keys()) == ["w"] and dict(model).keys() == {"w"}
    assert model["w"] is model["w"] is dict(model.items())["w"] is model.state_dict()["w"]
    assert model.get("v") is None
    with pytest.raises(KeyError, match="'v'"):
        model["v"]
    with pytest.raises(KeyError):
        model.raw("v")
    assert "1 tensors, 8 bytes" in repr(model)


def test_model_knows_where_it_came_from(client, path):
    first, second = client.open(path, name="n1"), client.open(path)
    assert (first.hit, second.hit) == (False, True)
    assert first.model_id == second.model_id and len(first.model_id) == 32
    assert first.load_seconds > 0 and first.nbytes == 8 and first.format == "safetensors"
    assert client.resident("n1").model_id == first.model_id
    assert client.resident(first.model_id[:8]).raw("w").tobytes() == GOOD[-8:]


def test_a_model_may_be_named_in_many_ways(client, path, monkeypatch):
    """By its name, its id, its path of any spelling and type, and by the Model itself."""
    monkeypatch.chdir(path.parent)
    model = client.open("m.safetensors", name="shown")
    relative = Path("m.safetensors")

    def entry():
        return next(entry for entry in client.list() if entry["id"] == model.model_id)

    texts = ("shown", model.model_id, str(path), bytes(path), "m.safetensors", "./m.safetensors")
    for spelling in (*texts, path, relative, model):
        assert client.why(spelling)["state"] == "resident", spelling
        assert client.verify(spelling)["ok"], spelling
        client.pin(spelling)
        assert entry()["pinned"], spelling
        client.unpin(spelling)
        assert client.resident(spelling).model_id == model.model_id, spelling
    for one in (relative, model):
        model.close()
        eventually(lambda: not entry()["leases"], what="the end of the leases")
        client.evict(one)
        model = client.open(relative)


def test_path_of_a_deleted_file_still_names_its_model(client, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    model = client.open(path)
    path.unlink()
    for spelling in ("m.safetensors", Path("m.safetensors")):
        assert client.why(spelling)["state"] == "resident"
        assert client.resident(spelling).model_id == model.model_id


def test_a_path_object_is_a_path_whatever_models_are_called(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).write_bytes(st_tensors({name: ("U8", [1], b"x")}))
    first, second = client.open("a", name="b"), client.open("b", name="a")
    assert client.resident("a").model_id == second.model_id
    assert client.resident(Path("a")).model_id == first.model_id


def test_second_name_of_a_resident_model_is_not_swallowed(client, path):
    first = client.open(path, name="first")
    second = client.open(path, name="second")
    assert (first.name, second.name) == ("first", "first") and "name" not in first.reason
    assert "resident as 'first'" in second.reason and "'second'" in second.reason
    with pytest.raises(modelcache.NotFoundError):
        client.resident("second")


def test_missing_file(client, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        client.open(tmp_path / "absent.safetensors")
    assert isinstance(caught.value, modelcache.Error)
    assert (caught.value.status, caught.value.code) == ("not_found", 2)
    assert "absent.safetensors" in str(caught.value)


def test_resident_only(client):
    with pytest.raises(modelcache.NotFoundError, match="no-such-model"):
        client.resident("no-such-model")


@pytest.mark.parametrize("paths", [[], ["x"] * 300, [""]])
def test_paths_no_daemon_could_accept(client, paths):
    with pytest.raises(modelcache.Error):
        client.open(paths)


@pytest.mark.parametrize("option", [{"format": "zip"}, {"device": "tpu"}])
def test_unknown_options(client, path, option):
    with pytest.raises(modelcache.Error) as caught:
        client.open(path, **option)
    assert next(iter(option.values())) in str(caught.value)


def test_names_and_paths_of_any_text(client, tmp_path):
    folder = tmp_path / "模型 ünï\tcode"
    folder.mkdir()
    target = folder / "a\nb.safetensors"
    target.write_bytes(st_tensors({"层.权重": ("U8", [1], b"\x07"), "": ("U8", [1], b"\x08")}))
    model = client.open(target, name="名")
    assert model["层.权重"].tolist() == [7] and model[""].tolist() == [8]
    assert model.name == "名"
    odd = bytes(folder) + b"/\xff\xfe.safetensors"
    with open(odd, "wb") as file:
        file.write(GOOD)
    assert client.open(odd).raw("w").tobytes() == GOOD[-8:]


def test_errors_are_kin_of_the_usual_ones():
    for name, base in (
        ("not_found", FileNotFoundError),
        ("timeout", TimeoutError),
        ("unavailable", ConnectionError),
        ("permission", PermissionError),
        ("no_room", MemoryError),
        ("bad_file", ValueError),
        ("unsupported", NotImplementedError),
        ("invalid_argument", ValueError),
    ):
        error = _ffi.error(name, "what happened")
        assert isinstance(error, base) and isinstance(error, modelcache.Error)
        assert error.status == name and _ffi.status_name(error.code) == name
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.code) == (type(error), "what happened", error.code)


def test_every_class_of_error_belongs_to_a_status_of_the_library():
    names = {_ffi.status_name(number) for number in range(1, 256)} - {"unknown"}
    from modelcache._errors import CLASSES

    assert set(CLASSES) <= names


def test_dtypes_are_read_from_the_library():
    import torch

    missing = [n for n in _ffi.dtype_names().values() if not hasattr(torch, n)]
    assert missing == ["float6_e2m3", "float6_e3m2"]


def test_structure_nodes():
    node = {
        "d": [
            ["a", {"l": [1, {"u": [True, None]}, "x"]}],
            [{"u": [1, 2]}, {"int": str(2**70)}],
            ["f", {"float": "-inf"}],
            ["b", {"bytes": "AAE="}],
            ["c", {"complex": [1, -2]}],
            ["s", {"set": [1]}],
            ["o", {"opaque": "m.C"}],
            ["t", {"t": 3}],
            ["u", {"t": 4, "is": 3}],
        ],
        "type": "OrderedDict",
        "attrs": {
            "_metadata": {"d": [["", {"d": [["version", 2]], "type": "dict"}]], "type": "dict"}
        },
    }
    made = _structure.rebuild(node, lambda number: f"tensor {number}")
    assert type(made) is collections.OrderedDict
    assert made == {
        "a": [1, (True, None), "x"],
        (1, 2): 2**70,
        "f": float("-inf"),
        "b": b"\0\1",
        "c": 1 - 2j,
        "s": {1},
        "o": modelcache.Opaque("m.C"),
        "t": "tensor 3",
        "u": "tensor 3",
    }
    assert made._metadata == _structure.version_metadata(node) == {"": {"version": 2}}
    assert _structure.same_objects(node) == {4: 3}
    with pytest.raises(modelcache.Error, match="unknown structure node"):
        _structure.rebuild({"zzz": 1}, None)


def test_library_that_is_not_there_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "modelcache", "--version"],
        capture_output=True,
        text=True,
        env=client_environment(MODELCACHE_LIBRARY="/nowhere/libmodelcache.so"),
        timeout=60,
    )
    assert done.returncode == 1
    assert "/nowhere/libmodelcache.so" in done.stderr and "MODELCACHE_LIBRARY" in done.stderr
    assert "Traceback" not in done.stderr


def test_library_is_found_next_to_an_installed_package(tmp_path):
    """<prefix>/lib/python3/dist-packages/modelcache with <prefix>/lib/libmodelcache.so."""
    import os
    import shutil
    from pathlib import Path

    library = Path(os.environ["MODELCACHE_LIBRARY"])
    package = tmp_path / "lib" / "python3" / "dist-packages" / "modelcache"
    shutil.copytree(Path(modelcache.__file__).parent, package)
    shutil.copy(library, tmp_path / "lib" / library.name)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MODELCACHE_")}
    environment["PYTHONPATH"] = str(package.parent)
    done = subprocess.run(
        [sys.executable, "-m", "modelcache", "--version"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert f"({tmp_path}/lib/{library.name})" in done.stdout, done.stderr


def test_control_c_ends_the_wait_for_a_cold_load(daemon, tmp_path):
    import os
    import signal

    from cachetest.files import sparse_st
    from cachetest.processes import Worker
    from cachetest.waiting import eventually

    large = sparse_st(tmp_path / "large.safetensors", 1024)
    code = """
    say("ready")
    wait()
    try:
        client.open(arguments["path"])
        say("loaded")
    except KeyboardInterrupt:
        say("interrupted")
    """
    before = daemon.resting_figures()
    with Worker(daemon, code, path=large) as worker:
        worker.hear()
        worker.go()
        eventually(lambda: daemon.loaders(large), what="a loader")
        os.kill(worker.pid, signal.SIGINT)
        heard = worker.hear()
        assert heard == "interrupted"
    daemon.comes_back_to(before)


def test_warm_open_with_all_tensors_is_much_faster_than_reading_the_file(client, tmp_path):
    """The figure itself belongs to the benchmark; this catches a lost order of magnitude."""
    from safetensors.torch import load_file

    path = tmp_path / "many.safetensors"
    path.write_bytes(
        st_tensors(
            {
                f"layers.{i}.w": ("F32", [32, 32], struct.pack("<1024f", *[i] * 1024))
                for i in range(1000)
            }
        )
    )
    client.open(path).close()

    def fastest(load):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            kept = load()
            times.append(time.perf_counter() - start)
            del kept
        return min(times)

    warm = fastest(lambda: client.open(path).state_dict())
    direct = fastest(lambda: load_file(path))
    assert warm * 2 < direct, (warm, direct)
