"""The loader's process: one call, made in surroundings like the caller's, and how it ends.

A job of the test's own stands for the daemon's: it writes down what the loader makes of it.
"""

import json
import os
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from modelcache import _payload, _serialise
from modelcache._serialise import Uncacheable

from cachetest import loaded_calls as calls
from cachetest.daemon import ROOT, clean_environment

_RUN = """
import json, pickle, sys
import torch
from modelcache import loader

PAYLOAD, RESULT = sys.argv[1:3]

class Job:
    def payload(self):
        return open(PAYLOAD, "rb").read()
    def commit(self, storages, tensors, metadata):
        import ctypes
        content = [ctypes.string_at(address, size) for address, size in storages]
        pickle.dump(("commit", content, tensors, metadata), open(RESULT, "wb"))
    def fail(self, code, message, detail=b""):
        pickle.dump(("fail", code, message, detail), open(RESULT, "wb"))

loader.run(Job())
"""


@pytest.fixture
def make(tmp_path):
    """make(function, *args, **kwargs): what a loader process made of the call."""

    def run(function, *args, **kwargs):
        payload, result = tmp_path / "payload", tmp_path / "result"
        description = {"function": "f", "parts": {}}
        payload.write_bytes(_payload.encode(function, args, kwargs, description=description))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _RUN, str(payload), str(result)],
            capture_output=True,
            cwd="/",
            env=clean_environment(PYTHONPATH=str(ROOT / "client" / "python")),
        )
        assert done.returncode == 0, done.stderr.decode()
        return pickle.loads(result.read_bytes())

    return run


def rebuilt(made, args=(), kwargs=None):
    """The object of a commit."""
    assert made[0] == "commit", made[:3]
    storages = [torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in made[1] if s]
    content = made[1][made[3]["python"]["stream"]]
    objects = _payload.argument_objects(args, kwargs or {})
    return _serialise.load(content, lambda n: storages[n].untyped_storage(), objects)


def failure(made):
    assert made[0] == "fail", made
    return made[1:]


# ---- a result -----------------------------------------------------------------------------------


def test_a_result_comes_with_what_people_and_clients_want_to_know(make, tmp_path):
    path = tmp_path / "w.pt"
    torch.save(torch.arange(3.0), path)
    made = make(calls.net_from, str(path))
    again = rebuilt(made)
    assert type(again) is calls.Net and again.w.tolist() == [0, 1, 2]
    _, _, tensors, metadata = made
    assert [(t.name, t.dtype, t.shape) for t in tensors] == [("w", "float32", (3,))]
    python = metadata["python"]
    assert python["function"] == "f" and python["seconds"] >= 0
    assert str(path) in json.dumps(python["files"])


def test_the_callers_folder_paths_environment_and_arguments(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOMETHING_OF_MINE", "é")
    monkeypatch.setattr(sys, "argv", ["script.py", "--option"])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "only_here.py").write_text("def f():\n    return 'found'\n")
    seen = rebuilt(make(calls.surroundings))
    assert seen["folder"] == str(tmp_path)
    assert seen["variable"] == "é" and seen["disabled"] == "1"
    assert seen["argv"] == ["script.py", "--option"]
    assert seen["import"] == "found"


def test_torch_defaults_of_the_caller(make):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            made = make(calls.new_tensor)
    finally:
        torch.set_default_dtype(torch.float32)
    again = rebuilt(made)
    assert (again.dtype, again.device.type) == (torch.float64, "meta")


def test_a_function_of_no_module_travels_by_its_content(make):
    pytest.importorskip("cloudpickle")
    factor = 3
    made = make(lambda n: torch.full((2,), float(n * factor)), 2)
    assert rebuilt(made).tolist() == [6, 6]


def test_methods_of_classes_go_by_name(make):
    again = rebuilt(make(calls.Other.made))
    assert type(again) is calls.Other


# ---- arguments ----------------------------------------------------------------------------------


def test_arguments_in_the_result_are_the_callers_own(make):
    config = calls.Config(1)
    nested = [config, {"deep": torch.ones(2)}]
    made = make(calls.keeps, nested, config=config)
    again = rebuilt(made, (nested,), {"config": config})
    assert again["config"] is config and again["first"] is nested
    assert again["tensor"] is nested[1]["deep"]
    assert again["own"].tolist() == [5]


def test_a_call_that_changes_an_argument_is_not_kept(make):
    code, message, _ = failure(make(calls.changes, {"a": 1}))
    assert code == "unsupported" and "changes its argument 0" in message


def test_a_part_of_an_argument_alone_in_the_result_is_not_kept(make):
    code, message, _ = failure(make(calls.first_weight, torch.nn.Linear(2, 2)))
    assert code == "unsupported" and "part of argument 0" in message


# ---- failures -----------------------------------------------------------------------------------


def test_exceptions_reach_the_caller_as_they_were(make):
    code, message, detail = failure(make(calls.raises, "no such model"))
    assert code == "loader_failed" and message == "Special: no such model (2)"
    raised = _payload.decode_failure(detail)
    assert type(raised) is calls.Special and raised.args == ("no such model", 2)
    assert "in raises" in str(raised.__cause__)


def test_exceptions_that_cannot_be_rebuilt_are_told_so(make):
    code, message, detail = failure(make(calls.raises_stubborn))
    assert code == "loader_failed" and "Stubborn" in message
    assert _payload.decode_failure(detail) is None


@pytest.mark.parametrize("detail", [b"", b"garbage", pickle.dumps((b"junk", "x")), b"\x80\x05."])
def test_damaged_details_are_no_exception(detail):
    assert _payload.decode_failure(detail) is None


def test_an_exit_in_the_call_is_the_callers(make):
    code, _, detail = failure(make(calls.exits))
    assert code == "loader_failed"
    assert isinstance(_payload.decode_failure(detail), SystemExit)


def test_what_cannot_be_kept_is_named_by_its_path(make):
    code, message, _ = failure(make(calls.holds_file, __file__))
    assert code == "unsupported"
    assert message == "parts['log'].stream: an open file cannot travel"


def test_arguments_that_do_not_unpickle_there_are_unsupported(make):
    code, message, _ = failure(make(calls.keeps, calls.OnlyHere()))
    assert code == "unsupported" and "cannot be made by a loader" in message


# ---- the script that calls ----------------------------------------------------------------------

_SCRIPT = """
import sys
import torch
from modelcache import _payload

class Net(torch.nn.Module):
    size = 3
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(self.size))
        self.helper = help_with

def help_with(n):
    return n + Net.size

def make():
    return Net()

def load(path):
    return torch.load(path, weights_only=False)

verb, path, payload = sys.argv[1:4]
assert not hasattr(sys, "ran"), "the script ran twice"
if verb == "save":
    torch.save(Net(), path)
call = {"make": (make,), "load": (torch.load, path), "save": (load, path)}[verb]
kwargs = {"weights_only": False} if verb == "load" else {}
with open(payload, "wb") as file:
    file.write(_payload.encode(call[0], call[1:], kwargs))
if len(sys.argv) > 4:
    import pickle
    from modelcache import _serialise
    kind, content, _, metadata = pickle.loads(open(sys.argv[4], "rb").read())
    storages = [torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in content]
    stream = content[metadata["python"]["stream"]]
    again = _serialise.load(stream, lambda n: storages[n].untyped_storage())
    assert type(again) is Net and again.helper is help_with, type(again)
    print(again.w.tolist(), again.helper(1))
"""


@pytest.fixture
def script(tmp_path):
    pytest.importorskip("cloudpickle")
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    environment = clean_environment(PYTHONPATH=str(ROOT / "client" / "python"))

    def run(command, *arguments):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command, *map(str, arguments)],
            capture_output=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def both(verb):
        files = [tmp_path / name for name in ("w.pt", "payload", "result")]
        run([str(path)], verb, *files[:2])
        run(["-c", _RUN], *files[1:])
        return pickle.loads(files[2].read_bytes()), lambda: run([str(path)], verb, *files)

    return both


def test_classes_and_functions_of_the_script_are_the_scripts_own(script):
    made, read = script("make")
    assert made[0] == "commit", made[:3]
    assert read() == "[1.0, 1.0, 1.0] 4"


def test_what_only_the_script_has_makes_the_call_unsupported(script):
    script("save")
    made, _ = script("load")
    code, message, _ = failure(made)
    assert code == "unsupported" and "'Net' of the script" in message


# ---- small parts --------------------------------------------------------------------------------


def test_names_of_argument_objects_do_not_depend_on_the_order_of_keywords():
    one, other = [1], {"x": [2]}
    first = _payload.argument_objects((one,), {"a": other, "b": 3})
    assert first == _payload.argument_objects((one,), {"b": 3, "a": other})
    assert first["argument 0"] is one and first["argument 'a'['x']"] is other["x"]
    plain = (1, "x", None, pathlib.Path("/"), torch.float32, torch.device("cpu"), int, len)
    assert _payload.argument_objects(plain, {}) == {}


def test_paths_among_the_arguments(tmp_path):
    found = _payload.argument_paths(([str(tmp_path)], "no such", 3), {"p": tmp_path / "x"})
    assert found == [str(tmp_path)]
    assert os.path.exists(tmp_path)


def test_uncacheable_survives_pickling():
    again = pickle.loads(pickle.dumps(Uncacheable("a.b", "why")))
    assert (again.path, again.why, str(again)) == ("a.b", "why", "a.b: why")
