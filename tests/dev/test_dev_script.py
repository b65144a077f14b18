"""The dev script: what it says when something is missing or mistyped, and what its test run tells."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "dev"))

import building  # noqa: E402
import checking  # noqa: E402
import environment  # noqa: E402
import shell  # noqa: E402

COMMANDS = ("build", "test", "demo", "bench", "format", "tidy", "fuzz", "env", "install", "clean")


def dev(*words, root=ROOT, **env):
    return subprocess.run(
        [str(root / "dev"), *words], env=dict(os.environ, **env), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False, cwd="/",
    )


@pytest.fixture
def checkout(tmp_path):
    """A checkout with nothing but the script and things that it could destroy."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools" / "dev", root / "tools" / "dev", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dev", root / "dev")
    for folder in ("build/release/bin", ".dev/log", ".venv"):
        (root / folder).mkdir(parents=True)
    return root


def everything(root):
    return sorted(path.relative_to(root) for path in root.rglob("*"))


def test_help_names_every_command():
    done = dev("help")
    assert done.returncode == 0
    for word in COMMANDS:
        assert re.search(rf"^ +{word} ", done.stdout, re.MULTILINE), word


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_says_how_it_is_used_and_does_nothing(checkout, command, flag):
    before = everything(checkout)
    done = dev(command, flag, root=checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ./dev {command} ")
    assert dev("help", command, root=checkout).stdout == done.stdout
    assert everything(checkout) == before and not Path("/", flag).exists()


@pytest.mark.parametrize("words", [
    *((command, "--nonsense") for command in COMMANDS), ("clean", "--al"), ("build", "more"), ("env", "more"),
    ("install",), ("install", ""), ("install", "/tmp/a", "/tmp/b"), ("fuzz", "0"), ("fuzz", "soon"),
    ("bench", "nonsense"), ("bench", "--rounds", "-1"), ("help", "biuld"),
], ids=" ".join)
def test_what_a_command_does_not_know_is_refused_and_does_nothing(checkout, words):
    before = everything(checkout)
    done = dev(*words, root=checkout)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dev: ") and done.stderr.count("\n") == 1
    assert everything(checkout) == before


def test_an_unknown_command_is_named():
    done = dev("biuld")
    assert done.returncode == 2 and "'biuld'" in done.stderr and "help" in done.stderr


def test_an_interpreter_that_does_not_exist_is_named():
    done = dev("build", MODELCACHE_PYTHON="/nowhere/python")
    assert done.returncode == 2 and "/nowhere/python" in done.stderr


@pytest.fixture
def built():
    if not (ROOT / "build" / "release" / "bin").exists():
        pytest.skip("build/release is not built")
    return ROOT / "build" / "release"


@pytest.mark.usefixtures("built")
def test_env_can_be_evaluated_and_keeps_what_was_there():
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


def test_cmake_finds_the_package_at_the_prefix_that_env_names(built, tmp_path):
    shutil.rmtree(built / "prefix", ignore_errors=True)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(user LANGUAGES CXX)\nfind_package(modelcache REQUIRED)\n"
        'get_target_property(library modelcache::client LOCATION)\nmessage(STATUS "it is ${library}")\n')
    done = subprocess.run(
        ["bash", "-ec", f'eval "$({ROOT}/dev env)"; cmake -S {tmp_path} -B {tmp_path}/build'],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"it is {built}/prefix/lib" in done.stdout


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Nothing is run: the commands that would be, as texts."""
    ran = []
    monkeypatch.setattr(building, "BUILD", tmp_path)
    monkeypatch.setattr(building, "run", lambda command, **_: ran.append(" ".join(map(str, command))))
    monkeypatch.setattr(environment, "ensure_packages", lambda packages: None)
    monkeypatch.setattr(environment, "ensure_python", lambda **_: None)
    (tmp_path / "release").mkdir()
    (tmp_path / "tsan").mkdir()
    return ran


def test_a_release_build_ends_with_its_prefix_installed(commands, tmp_path):
    building.build()
    assert commands[-1] == f"cmake --install {tmp_path}/release --prefix {tmp_path}/release/prefix"
    building.build("tsan")
    assert commands[-1].startswith("cmake --build")
    building.build(targets=["one"])
    assert commands[-1].endswith("--target one")


class Suites:
    """Stands for build, ctest and pytest; `skipped` is what pytest says it skipped."""

    def __init__(self, monkeypatch):
        self.built, self.ran, self.skipped = {}, {}, []
        monkeypatch.setattr(environment, "ensure_packages", lambda packages: None)
        monkeypatch.setattr(environment, "ensure_python", lambda **_: None)
        monkeypatch.setattr(building, "build", self._build)
        for name in ("tidy", "format_sources"):
            monkeypatch.setattr(checking, name, lambda **_: None)
        monkeypatch.setattr(checking, "_tee", self._tee)

    def _build(self, preset="release", *, targets=()):
        self.built[preset] = tuple(targets)

    def _tee(self, command, **_):
        if command[0] == "ctest":
            self.ran[command[command.index("--preset") + 1]] = command
            return 0, "100% tests passed, 0 tests failed out of 9\n"
        return 0, "".join(f"SKIPPED [1] {reason}\n" for reason in self.skipped) + "=== 9 passed in 1.00s ===\n"


@pytest.fixture
def suites(monkeypatch):
    return Suites(monkeypatch)


def test_the_thread_sanitizer_runs_what_has_threads_and_builds_no_more(suites):
    assert checking.test() == 0
    assert set(suites.built["tsan"]) >= {"client_test", "server_daemon_test", "loader_test"}
    pattern = suites.ran["tsan"][suites.ran["tsan"].index("-R") + 1]
    assert all(re.fullmatch(pattern, name) for name in suites.built["tsan"])
    assert not re.fullmatch(pattern, "proto_test")


def test_a_machine_that_was_not_booted_is_told_and_fails_where_it_is_required(suites, capsys):
    suites.skipped = ["tests/systemd/test_systemd_units.py:53: booting a machine needs root"]
    assert checking.test() == 0
    told = capsys.readouterr()
    assert "NOT RUN: [1] tests/systemd/test_systemd_units.py:53: booting a machine needs root" in told.err
    assert "but some were not run" in told.err
    assert checking.test(require_boot=True) == 1
    assert "FAILED: the booted systemd (skipped)" in capsys.readouterr().err


def test_other_skips_are_told_and_fail_nothing(suites, capsys):
    suites.skipped = ["tests/python/test_processes.py:96: this host has a GPU"]
    assert checking.test(require_boot=True) == 0
    assert "NOT RUN: [1] tests/python/test_processes.py:96: this host has a GPU" in capsys.readouterr().err


def test_ci_requires_the_booted_machine():
    assert "./dev test --require-boot" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_two_summaries_come_last(suites, capsys):
    checking.test()
    assert capsys.readouterr().out.splitlines() == [
        "100% tests passed, 0 tests failed out of 9", "=== 9 passed in 1.00s ==="]
