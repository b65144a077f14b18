"""Format check, clang-tidy, ctest, pytest, fuzzing."""

import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import building
import environment
from shell import BUILD, ROOT, STATE, DevError, Step, capture, jobs, run, say

ROOMS = ("common", "proto", "server", "client", "tests", "docs")
CXX = (".h", ".hpp", ".cc", ".cpp", ".c")
# Headers of libtorch do not compile with clang 14 in C++20 mode; g++ -Werror covers these files.
TORCH = re.compile(r'#include [<"](torch|ATen|c10|caffe2)/|modelcache/torch\.hpp')
# Programs whose threads share memory: the others would only repeat what the other sanitizers ran.
THREADED = ("client_test", "client_api_test", "server_edges_test", "server_daemon_test", "loader_test")
BOOTED = "tests/systemd/"  # what needs a systemd of its own
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def sources():
    files = capture(["git", "ls-files", "-co", "--exclude-standard", *ROOMS], cwd=ROOT)
    if files is None:  # an unpacked archive
        names = [p for room in ROOMS for p in (ROOT / room).rglob("*") if p.is_file()]
    else:
        names = [ROOT / name for name in files.splitlines()]
    return sorted(p for p in names if p.suffix in CXX and p.exists())


def format_sources(*, check):
    """Formats every source in place, or with `check` only raises when one would change."""
    environment.ensure_packages(environment.CHECK_PACKAGES)
    mode = ["--dry-run", "--Werror"] if check else ["-i"]
    with Step("format check" if check else "format"):
        run(["clang-format-14", "--style=file", *mode, *sources()],
            hint="run ./dev format" if check else None)


def _closure(path, seen):
    """`path` and every file of ours it includes, directly or not."""
    if path in seen:
        return
    seen.add(path)
    for name in INCLUDE.findall(path.read_text(encoding="utf-8", errors="replace")):
        for base in (ROOT, path.parent, ROOT / "client" / "include"):
            if (base / name).exists():
                _closure((base / name).resolve(), seen)
                break


def _tidy_key(entry, closure):
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
    digest.update((ROOT / "tests" / ".clang-tidy").read_bytes())
    digest.update(entry.get("command", "").encode())
    for path in sorted(closure):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _tidy_jobs():
    """(source, stamp) of every file of the database that changed since it was last clean."""
    database = json.loads((BUILD / "release" / "compile_commands.json").read_text(encoding="utf-8"))
    todo = {}
    for entry in database:
        path = Path(entry["directory"], entry["file"]).resolve()
        if ROOT not in path.parents or BUILD in path.parents:
            continue
        closure = set()
        _closure(path, closure)
        if any(TORCH.search(p.read_text(encoding="utf-8", errors="replace")) for p in closure):
            continue
        stamp = STATE / "tidy" / _tidy_key(entry, closure)
        if not stamp.exists():
            todo[path] = stamp
    return todo


def _tidy_one(path):
    done = subprocess.run(
        ["clang-tidy-14", "-p", BUILD / "release", "--quiet", path],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        check=False,
    )
    return path, done.returncode, done.stdout


def tidy():
    """Runs clang-tidy on what changed. Needs build/release. Raises DevError."""
    environment.ensure_packages(environment.CHECK_PACKAGES)
    todo = _tidy_jobs()
    (STATE / "tidy").mkdir(parents=True, exist_ok=True)
    bad = []
    with Step(f"clang-tidy ({len(todo)} files changed)"):
        with concurrent.futures.ThreadPoolExecutor(jobs()) as pool:
            for path, code, text in pool.map(_tidy_one, todo):
                if code:
                    bad.append(path)
                    print(text, flush=True)
                else:
                    todo[path].touch()
        if bad:
            names = " ".join(str(path.relative_to(ROOT)) for path in bad)
            raise DevError(f"clang-tidy found something in {names}")


def _summary(text, pattern):
    lines = [line.strip() for line in text.splitlines() if re.search(pattern, line)]
    return lines[-1] if lines else None


def _tee(command, *, env, log):
    """Runs with the output both shown and kept; returns (exit code, output)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    with open(log, "w", encoding="utf-8") as out, subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            out.write(line)
            kept.append(line)
    return process.returncode, "".join(kept)


def ctest(preset, arguments=()):
    """Returns (passed, ctest's own summary line)."""
    code, text = _tee(
        ["ctest", "--preset", preset, "-j", jobs(), *arguments],
        env=environment.run_environment(preset), log=STATE / "log" / f"ctest-{preset}.log",
    )
    return code == 0, _summary(text, r"\d+% tests passed") or f"ctest {preset}: no summary"


def pytest(arguments=()):
    """Returns (passed, pytest's own summary line, what was skipped and why)."""
    code, text = _tee(
        [environment.python(), "-m", "pytest", "-ra", "-p", "no:cacheprovider", "tests", *arguments],
        env=environment.run_environment(), log=STATE / "log" / "pytest.log",
    )
    line = _summary(text, r"\b(passed|failed|error|no tests ran)\b.* in ") or "pytest: no summary"
    return code == 0, line, re.findall(r"^SKIPPED (\[\d+\] .*)$", text, re.MULTILINE)


class Report:
    """Runs every check to its end and remembers what failed."""

    def __init__(self):
        self.failed = []
        self.lines = []
        self.skipped = []

    def check(self, name, action):
        try:
            action()
        except DevError as error:
            say(str(error))
            self.failed.append(name)

    def suite(self, name, passed, line, skipped=()):
        self.lines.append(f"{name}: {line}")
        self.skipped += skipped
        if not passed:
            self.failed.append(name)
        return line

    def require_boot(self):
        if any(BOOTED in reason for reason in self.skipped):
            self.failed.append("the booted systemd (skipped)")

    def tell(self):
        for line in self.lines:
            say(line)
        for reason in self.skipped:
            say(f"NOT RUN: {reason}")
        if self.failed:
            say(f"FAILED: {', '.join(self.failed)}; logs are in {(STATE / 'log').relative_to(ROOT)}/")
        else:
            say("all checks passed" + (", but some were not run" if self.skipped else ""))


def test(*, require_boot=False):
    """Everything: build, format, clang-tidy, sanitizers, ctest, pytest.

    With `require_boot` a skipped test of the booted systemd counts as a failure.
    """
    environment.ensure_packages(environment.CHECK_PACKAGES)
    environment.ensure_python(for_tests=True)
    building.build()
    report = Report()
    report.check("format", lambda: format_sources(check=True))
    report.check("clang-tidy", tidy)
    report.check("sanitizers", lambda: _sanitized(report))
    report.check("thread sanitizer", lambda: _threads(report))
    with Step("ctest"):
        ctest_line = report.suite("ctest", *ctest("release"))
    with Step("pytest"):
        pytest_line = report.suite("pytest", *pytest())
    if require_boot:
        report.require_boot()
    report.tell()
    print(ctest_line)
    print(pytest_line, flush=True)
    return 1 if report.failed else 0


def _sanitized(report):
    building.build("asan")
    with Step("ctest under the address and undefined-behaviour sanitizers"):
        report.suite("ctest (sanitizers)", *ctest("asan"))


def _threads(report):
    building.build("tsan", targets=THREADED)
    with Step("ctest of what has threads under the thread sanitizer"):
        report.suite("ctest (threads)", *ctest("tsan", ["-R", f"^({'|'.join(THREADED)})$"]))


def fuzz(seconds):
    """Each libFuzzer target for its share of `seconds`, starting from the committed corpus."""
    environment.ensure_packages(environment.FUZZ_PACKAGES)
    if not shutil.which("clang++-14"):
        raise DevError("clang++-14 is missing: apt-get install clang-14 libclang-rt-14-dev")
    building.build("fuzz", targets=["fuzz_targets"])
    names = sorted(path.name for path in (BUILD / "fuzz" / "bin").glob("*_fuzz"))
    share = max(1, seconds // max(1, len(names)))
    for name in names:
        found = STATE / "fuzz" / name
        found.mkdir(parents=True, exist_ok=True)
        seeds = ROOT / "tests" / "fuzz" / "corpus" / name.removesuffix("_fuzz")
        with Step(f"{name} for {share} s"):
            run([BUILD / "fuzz" / "bin" / name, f"-max_total_time={share}", "-rss_limit_mb=2048",
                 "-timeout=10", "-print_final_stats=1", f"-artifact_prefix={found}/crash-",
                 found, seeds], log=STATE / "log" / f"{name}.log",
                env=dict(os.environ, UBSAN_OPTIONS="halt_on_error=1"),
                hint=f"the input that did it is in {found}; replay: build/fuzz/bin/{name} FILE")
