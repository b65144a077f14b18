"""The units: what systemd-analyze says of them, and what a real systemd does with them."""

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import machine
import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MODELCACHE_BUILD", ROOT / "build" / "release"))
CTL = "/usr/local/bin/modelcachectl"


def install(destination, prefix="/usr/local"):
    subprocess.run(
        ["cmake", "--install", str(BUILD), "--prefix", prefix],
        env=dict(os.environ, DESTDIR=str(destination)), check=True, stdout=subprocess.DEVNULL,
    )


def write_model(path):
    """A safetensors file with one tensor of 4 MiB."""
    size = 4 << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(256)) * (size // 256))
    path.chmod(0o644)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
@pytest.mark.parametrize("instance", ["system", "user"])
def test_systemd_analyze_verify_has_no_complaint(tmp_path, instance):
    prefix = tmp_path / "prefix"
    install("", str(prefix))
    units = prefix / "lib" / "systemd" / instance
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--{instance}",
         str(units / "modelcached.socket"), str(units / "modelcached.service")],
        env=dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path)), text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    ours = [line for line in done.stdout.splitlines() if "modelcache" in line]
    assert done.returncode == 0 and not ours, done.stdout


@pytest.fixture(scope="module")
def booted(tmp_path_factory):
    reason = machine.unavailable()
    if reason:
        pytest.skip(reason)
    with machine.Machine(tmp_path_factory.mktemp("machine")) as box:
        install(box.root)
        write_model(box.root / "srv" / "model.safetensors")
        box.boot()
        box.run("systemd-sysusers")
        yield box


def check_life(box, *, manager, user, env):
    """Socket first, service on demand, READY, a clean stop, and the socket still there."""
    as_user = {"user": user, "env": env}

    def state(unit):
        return box.properties(unit, "ActiveState", "SubState", "Result", "MainPID",
                              manager=manager, **manager_as)

    manager_as = as_user if "--user" in manager else {}
    systemctl = lambda *words: box.run(*manager, *words, **manager_as)  # noqa: E731
    ctl = lambda *words: box.run(CTL, *words, **as_user).stdout  # noqa: E731

    systemctl("start", "modelcached.socket")
    assert state("modelcached.socket")["SubState"] == "listening"
    assert state("modelcached.service")["ActiveState"] == "inactive"

    ctl("load", "/srv/model.safetensors")
    first = state("modelcached.service")
    # Type=notify: a service is active only after its READY=1.
    assert (first["ActiveState"], first["SubState"]) == ("active", "running")
    status = json.loads(ctl("--json", "status"))
    assert str(status["daemon_pid"]) == first["MainPID"]
    assert status["entries"] == 1 and status["arena_bytes"] == 4 << 20
    assert json.loads(ctl("--json", "verify", "/srv/model.safetensors"))["ok"] is True

    systemctl("stop", "modelcached.service")
    stopped = state("modelcached.service")
    assert (stopped["ActiveState"], stopped["Result"]) == ("inactive", "success")
    assert state("modelcached.socket")["SubState"] == "listening"

    # The socket file was left alone, so the next client starts the next daemon.
    assert json.loads(ctl("--json", "status"))["entries"] == 0
    assert state("modelcached.service")["MainPID"] != first["MainPID"]
    systemctl("stop", "modelcached.socket", "modelcached.service")


def test_system_instance_is_started_by_its_socket_and_stops_cleanly(booted):
    check_life(booted, manager=("systemctl",), user="modelcache", env=("MODELCACHE_AUTOSTART=0",))


def test_root_may_use_the_system_instance(booted):
    booted.run("systemctl", "start", "modelcached.socket")
    booted.run(CTL, "load", "/srv/model.safetensors", env=("MODELCACHE_AUTOSTART=0",))
    booted.run("systemctl", "stop", "modelcached.socket", "modelcached.service")


def test_another_user_may_not_use_the_system_instance(booted):
    booted.run("systemctl", "start", "modelcached.socket")
    done = booted.run(CTL, "--socket", "/run/modelcache/socket", "status", user="nobody",
                      env=("MODELCACHE_AUTOSTART=0",), check=False)
    assert done.returncode == 1 and "Permission denied" in done.stdout, done.stdout
    assert booted.properties("modelcached.service", "ActiveState")["ActiveState"] == "inactive"
    booted.run("systemctl", "stop", "modelcached.socket")


def test_user_instance_is_started_by_its_socket_and_stops_cleanly(booted):
    uid = booted.run("id", "-u", "modelcache").stdout.strip()
    booted.run("systemctl", "start", f"user@{uid}.service")
    check_life(booted, manager=("systemctl", "--user"), user="modelcache",
               env=(f"XDG_RUNTIME_DIR=/run/user/{uid}", "MODELCACHE_AUTOSTART=0"))


def test_a_killed_daemon_is_restarted_and_serves_again(booted):
    booted.run("systemctl", "start", "modelcached.service")
    before = booted.properties("modelcached.service", "MainPID")["MainPID"]
    booted.run("systemctl", "kill", "--signal=KILL", "modelcached.service")
    # The socket keeps the request until the next daemon is there.
    status = booted.run(CTL, "--json", "status", user="modelcache", env=("MODELCACHE_AUTOSTART=0",))
    assert str(json.loads(status.stdout)["daemon_pid"]) != before
    booted.run("systemctl", "stop", "modelcached.socket", "modelcached.service")
