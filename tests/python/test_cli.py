"""modelcachectl: every command, its JSON, its exit codes."""

import json
import re

import pytest
import torch

from cachetest.daemon import ROOT, Daemon, ctl_json, run_ctl
from cachetest.files import GOOD, sharded

DONE, REFUSED, USAGE, NO_DAEMON = 0, 1, 2, 3


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(GOOD)
    return path


def test_load_and_list(daemon, path):
    loaded = ctl_json(daemon, "load", path, "--name", "mine")
    assert (loaded["name"], loaded["hit"]) == ("mine", False)
    assert re.fullmatch("[0-9a-f]{32}", loaded["id"])
    assert "mine" in daemon.ctl("list", check=DONE).stdout
    (entry,) = [m for m in ctl_json(daemon, "list")["models"] if m["name"] == "mine"]
    assert entry["id"] == loaded["id"]
    assert (entry["tensors"], entry["storage_bytes"], entry["format"]) == (1, 8, "safetensors")
    assert entry["leases"] == 0
    again = daemon.ctl("load", path, check=DONE)
    assert "hit" in again.stdout.lower() or "resident" in again.stdout.lower(), again.stdout


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_load_of_every_kind(daemon, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    script = torch.jit.script(torch.nn.Linear(2, 2))
    script.save(str(tmp_path / "s.pt"))
    folder = sharded(tmp_path / "folder", {"a.safetensors": {"w": ("U8", [1], b"\x07")}})
    for target, kind in (
        (tmp_path / "a.pt", "torch"),
        (tmp_path / "s.pt", "torchscript"),
        (folder, "safetensors"),
    ):
        loaded = ctl_json(daemon, "load", target)
        shown = ctl_json(daemon, "show", loaded["id"])
        assert shown["format"] == kind
        assert ctl_json(daemon, "verify", loaded["id"])["ok"]


def test_load_of_several_paths(daemon, tmp_path):
    """An index and its shards, each named."""
    folder = sharded(tmp_path / "m", {f"{n}.safetensors": {n: ("U8", [1], b"x")} for n in "ab"})
    index = folder / "model.safetensors.index.json"
    loaded = ctl_json(daemon, "load", index, folder / "a.safetensors", folder / "b.safetensors")
    assert ctl_json(daemon, "load", folder)["id"] == loaded["id"]
    assert [t["name"] for t in ctl_json(daemon, "show", loaded["id"])["tensors"]] == ["a", "b"]


def test_load_of_an_asked_format(daemon, path):
    daemon.ctl("load", path, "--format", "safetensors", check=DONE)
    failed = daemon.ctl("load", path, "--format", "torchscript", check=REFUSED)
    assert "m.safetensors" in failed.stderr


def test_show_is_a_table_of_tensors(daemon, path):
    daemon.ctl("load", path, check=DONE)
    shown = ctl_json(daemon, "show", path)
    (tensor,) = shown["tensors"]
    assert {k: tensor[k] for k in ("name", "dtype", "shape", "stride", "offset", "storage")} == {
        "name": "w",
        "dtype": "float32",
        "shape": [2],
        "stride": [1],
        "offset": 0,
        "storage": 0,
    }
    text = daemon.ctl("show", path, check=DONE).stdout
    assert "w" in text and "float32" in text


def test_looking_is_no_hit(daemon, path):
    daemon.ctl("load", path, check=DONE)
    before = ctl_json(daemon, "why", path)["history"]
    hits = daemon.status()["hits"]
    for command in ("show", "why"):
        daemon.ctl(command, path, check=DONE)
        daemon.ctl("--json", command, path, check=DONE)
    assert daemon.status()["hits"] == hits
    events = [event["event"] for event in ctl_json(daemon, "why", path)["history"]]
    assert events == [event["event"] for event in before]
    with daemon.client() as client:
        client.resident(path)
    assert daemon.status()["hits"] == hits + 1


def test_second_name_is_refused_in_words(daemon, path):
    daemon.ctl("load", path, "--name", "alpha", check=DONE)
    text = daemon.ctl("load", path, "--name", "beta", check=DONE).stdout
    assert text.startswith("alpha\n") and "resident as 'alpha'" in text and "'beta'" in text
    loaded = ctl_json(daemon, "load", path, "--name", "beta")
    assert loaded["name"] == "alpha" and "resident as 'alpha'" in loaded["reason"]
    assert "beta" not in ctl_json(daemon, "load", path, "--name", "alpha")["reason"]


def test_relative_path_of_a_deleted_file(daemon, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    identity = ctl_json(daemon, "load", path.name)["id"]
    path.unlink()
    for spelling in (path.name, "./" + path.name):
        assert ctl_json(daemon, "show", spelling)["id"] == identity
        assert ctl_json(daemon, "why", spelling)["state"] == "resident"
    daemon.ctl("evict", path.name, check=DONE)


def test_show_leaves_no_lease(daemon, path):
    daemon.ctl("load", path, check=DONE)
    leases = daemon.status()["leases"]
    daemon.ctl("show", path, check=DONE)
    assert daemon.status()["leases"] == leases


def documented_keys():
    """Command to the members of its JSON object, as the table of docs/client.md lists them."""
    page = (ROOT / "docs" / "client.md").read_text()
    table = page.split("| command | members |", 1)[1].split("\n\n", 1)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): set(re.findall("`([a-z_]+)`", row[1])) for row in rows}


def test_json_of_every_command_is_as_documented(tmp_path, path):
    with Daemon(tmp_path / "d") as running:
        seen = {"load": ctl_json(running, "load", path)}
        seen["show"] = ctl_json(running, "show", path)
        seen["list"] = ctl_json(running, "list")
        for name in ("show", "list"):
            inner = {"show": "tensors", "list": "models"}[name]
            seen[f"{name}, each of {inner}"] = seen[name][inner][0]
        for command in ("status", "metrics"):
            seen[command] = ctl_json(running, command)
        for command in ("why", "verify", "pin", "unpin", "evict"):
            seen[command] = ctl_json(running, command, path)
        seen["why, each of history"] = seen["why"]["history"][0]
        refused = json.loads(running.ctl("--json", "evict", "nobody", check=REFUSED).stdout)
        seen["a failure"], seen["a failure, error"] = refused, refused["error"]
        seen["shutdown"] = ctl_json(running, "shutdown")
        running.process.wait(timeout=10)
    assert {name: set(members) for name, members in seen.items()} == documented_keys()


def test_texts_have_human_units_and_hints(daemon, path):
    daemon.evict_all()
    assert "'modelcachectl load PATH'" in daemon.ctl("list", check=DONE).stdout
    daemon.ctl("load", path, "--name", "human", check=DONE)
    assert "unpin" in daemon.ctl("pin", "human", check=DONE).stdout
    assert "pinned" in daemon.ctl("list", check=DONE).stdout
    assert "8 B" in daemon.ctl("show", "human", check=DONE).stdout
    assert str(path) in daemon.ctl("list", "--wide", check=DONE).stdout
    daemon.ctl("unpin", "human", check=DONE)
    daemon.ctl("evict", "human", check=DONE)
    assert "the next open loads it" in daemon.ctl("why", path, check=DONE).stdout


def test_status_has_what_it_promises(daemon):
    status = ctl_json(daemon, "status")
    for name in (
        "daemon_pid",
        "version",
        "memory_budget_bytes",
        "arena_bytes",
        "entries",
        "loads",
        "hits",
        "misses",
        "evictions",
        "leases",
        "clients",
    ):
        assert name in status, name
    assert status["daemon_pid"] == daemon.pid
    assert status["memory_budget_bytes"] == 8 * 2**30
    assert str(daemon.pid) in daemon.ctl("status", check=DONE).stdout


def test_pin_unpin_evict(daemon, path):
    identity = ctl_json(daemon, "load", path, "--pin")["id"]
    assert daemon.ctl("evict", identity, check=REFUSED).stderr
    daemon.ctl("unpin", path, check=DONE)
    daemon.ctl("pin", identity[:12], check=DONE)
    failed = json.loads(daemon.ctl("--json", "evict", path, check=REFUSED).stdout or "{}")
    assert failed == {} or failed["error"]["code"] == "in_use"
    daemon.ctl("unpin", identity, check=DONE)
    daemon.ctl("evict", path, check=DONE)
    assert identity not in {m["id"] for m in ctl_json(daemon, "list")["models"]}


def test_why_tells_the_history(daemon, path):
    daemon.ctl("load", path, check=DONE)
    daemon.ctl("load", path, check=DONE)
    why = ctl_json(daemon, "why", path)
    assert why["state"] == "resident"
    events = [event["event"] for event in why["history"]]
    assert events.index("miss") < events.index("load") < events.index("hit")
    assert all(event["reason"] for event in why["history"] if event["event"] in ("hit", "miss"))
    assert "miss" in daemon.ctl("why", path, check=DONE).stdout


def test_verify_sees_a_changed_file(daemon, path):
    daemon.ctl("load", path, "--name", "checked", check=DONE)
    same = ctl_json(daemon, "verify", "checked")
    assert (same["ok"], same["disk"], same["storages"], same["bytes"]) == (True, "same", 1, 8)
    path.write_bytes(GOOD[:-1] + b"\x7f")
    changed = json.loads(daemon.ctl("--json", "verify", "checked", check=REFUSED).stdout)
    assert (changed["ok"], changed["memory_ok"], changed["disk"]) == (False, True, "differs")
    text = daemon.ctl("verify", "checked", check=REFUSED).stdout
    assert text.startswith("DIFFERS: the files on disk are not what was loaded\n"), text
    assert "intact" in text and "DAMAGED" not in text


def test_verify_without_the_file(daemon, path):
    daemon.ctl("load", path, "--name", "orphan", check=DONE)
    path.unlink()
    verified = ctl_json(daemon, "verify", "orphan")
    assert (verified["ok"], verified["disk"]) == (True, "unavailable")


def test_metrics_are_prometheus_text(daemon, path):
    daemon.ctl("load", path, check=DONE)
    text = daemon.ctl("metrics", check=DONE).stdout
    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert samples
    for line in samples:
        assert re.fullmatch(r"[a-zA-Z_:][\w:]*(\{[^}]*\})? [-+0-9.eE]+(Inf|NaN)?", line), line
    assert re.search(r"^modelcache\w*_hits\w* \d", text, re.MULTILINE), text
    assert "text" in ctl_json(daemon, "metrics")


def test_unknown_models_are_refused(daemon):
    for command in ("show", "evict", "pin", "unpin", "verify"):
        failed = daemon.ctl(command, "no-such-model", check=REFUSED)
        assert "no-such-model" in failed.stderr, command
    failed = json.loads(daemon.ctl("--json", "evict", "no-such-model", check=REFUSED).stdout)
    assert failed["error"]["code"] == "not_found"


def test_missing_file_is_refused(daemon, tmp_path):
    failed = daemon.ctl("load", tmp_path / "absent.safetensors", check=REFUSED)
    assert "absent.safetensors" in failed.stderr and failed.stdout == ""


def test_bad_file_is_refused(daemon, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(GOOD[:-1])
    failed = daemon.ctl("load", tmp_path / "bad.safetensors", check=REFUSED)
    assert "bad.safetensors" in failed.stderr and "71" in failed.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["load"],
        ["evict"],
        ["list", "--frobnicate"],
        ["load", "--format", "zip", "x"],
    ],
    ids=["nothing", "command", "no path", "no model", "option", "format"],
)
def test_usage_errors(daemon, arguments):
    """One line, with the program's name and where to read on."""
    (line,) = daemon.ctl(*arguments, check=USAGE).stderr.splitlines()
    assert line.startswith("modelcachectl: ") and line.endswith("see 'modelcachectl --help'")


def test_unknown_command_is_named(daemon):
    assert "unknown command 'frobnicate'" in daemon.ctl("frobnicate", "x", check=USAGE).stderr
    assert "unknown command 'frobnicate'" in run_ctl("--json", "frobnicate", check=USAGE).stderr


def test_help_and_version():
    done = run_ctl("--help", check=DONE)
    for command in (
        "load",
        "list",
        "show",
        "status",
        "evict",
        "pin",
        "unpin",
        "why",
        "verify",
        "metrics",
        "shutdown",
    ):
        assert command in done.stdout, command
    assert re.search(r"\d+\.\d+\.\d+", run_ctl("--version", check=DONE).stdout)


@pytest.mark.parametrize("command", [["list"], ["status"], ["why", "m"], ["shutdown"]])
def test_no_daemon(tmp_path, command):
    where = str(tmp_path / "socket")
    failed = run_ctl("--socket", where, *command, check=NO_DAEMON)
    message, hint = failed.stderr.splitlines()
    assert message == f"modelcachectl: no daemon answers at {where}: No such file or directory"
    assert f"'modelcached --socket {where}'" in hint
    failed = run_ctl("--socket", where, "--json", *command, check=NO_DAEMON)
    assert json.loads(failed.stdout)["error"]["code"] == "unavailable"


def test_shutdown_ends_the_daemon_and_removes_its_socket(tmp_path):
    with Daemon(tmp_path / "d") as running:
        running.ctl("shutdown", check=DONE)
        assert running.process.wait(timeout=10) == 0
        assert not (tmp_path / "d" / "socket").exists()
        running.process = None


def test_python_module_command(daemon, tmp_path):
    import subprocess
    import sys

    from cachetest.processes import client_environment

    def module(*arguments, socket):
        return subprocess.run(
            [sys.executable, "-m", "modelcache", *arguments],
            capture_output=True,
            text=True,
            env=client_environment(MODELCACHE_SOCKET=socket),
            timeout=60,
        )

    assert "library 0." in module("--version", socket=daemon.socket).stdout
    status = module("--status", socket=daemon.socket)
    assert json.loads(status.stdout)["daemon_pid"] == daemon.pid
    nobody = module("--status", socket=str(tmp_path / "nobody"))
    assert nobody.returncode == NO_DAEMON and "nobody" in nobody.stderr
