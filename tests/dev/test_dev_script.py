"""The dev script: what it says when something is missing or mistyped."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "dev"))

import environment  # noqa: E402
import shell  # noqa: E402


def dev(*words, **env):
    return subprocess.run(
        [str(ROOT / "dev"), *words], env=dict(os.environ, **env), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, cwd="/",
    )


def test_help_names_every_command():
    done = dev("help")
    assert done.returncode == 0
    for word in ("build", "test", "demo", "bench", "format", "tidy", "fuzz", "env", "install", "clean"):
        assert re.search(rf"^  ([a-z]+ \| )*{word}\b", done.stdout, re.MULTILINE), word


def test_an_unknown_command_is_named():
    done = dev("biuld")
    assert done.returncode == 2 and "'biuld'" in done.stderr and "help" in done.stderr


def test_an_interpreter_that_does_not_exist_is_named():
    done = dev("build", MODELCACHE_PYTHON="/nowhere/python")
    assert done.returncode == 2 and "/nowhere/python" in done.stderr


def test_an_unknown_bench_is_named_before_anything_is_built():
    done = dev("bench", "nonsense")
    assert done.returncode == 1 and "nonsense" in done.stderr and "build" not in done.stderr


def test_env_can_be_evaluated_and_keeps_what_was_there():
    if not (ROOT / "build" / "release" / "bin").exists():
        pytest.skip("build/release is not built")
    done = subprocess.run(
        ["bash", "-ec", f'eval "$({ROOT}/dev env)"; command -v modelcachectl; echo "$PYTHONPATH"'],
        env=dict(os.environ, PYTHONPATH="/kept"), stdout=subprocess.PIPE, text=True, check=False,
    )
    ctl, python_path = done.stdout.split()
    assert ctl == str(ROOT / "build" / "release" / "bin" / "modelcachectl")
    assert python_path == f"{ROOT}/client/python:/kept"


def test_missing_packages_without_root_say_what_to_type(monkeypatch):
    monkeypatch.setattr(environment, "_missing", lambda packages: ["catch2", "g++"])
    monkeypatch.setattr(environment, "_as_root", lambda: None)
    with pytest.raises(shell.DevError, match="apt-get install catch2 g"):
        environment.ensure_packages({"catch2": None})


def test_a_package_is_missing_until_dpkg_says_it_is_installed(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, "zlib1g-dev installed\ncatch2 not-installed\n")
    monkeypatch.setattr(environment.subprocess, "run", lambda *a, **k: answer)
    wanted = {"zlib1g-dev": None, "catch2": None, "never-heard-of": None}
    assert environment._missing(wanted) == ["catch2", "never-heard-of"]


def test_an_interpreter_without_torch_is_told_what_to_install(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho torch\n")
    python.chmod(0o755)
    monkeypatch.setenv("MODELCACHE_PYTHON", str(python))
    with pytest.raises(shell.DevError, match="-m pip install torch"):
        environment.ensure_python()


def test_a_failing_program_leaves_the_end_of_its_log_and_a_hint(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(shell.DevError) as caught:
        shell.run(["sh", "-c", "echo what went wrong; exit 3"], log=log, hint="try that")
    text = str(caught.value)
    assert "what went wrong" in text and "exit 3" in text and text.endswith("try that")
