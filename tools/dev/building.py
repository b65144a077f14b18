"""Configuring and building with the presets of CMakePresets.json."""

import shutil

import environment
from shell import BUILD, ROOT, STATE, Step, capture, jobs, run

CHECKED_COMPILER = "12"  # major version of g++ on Debian 12


def _warnings():
    """Warnings are errors with the compiler the project is checked with; others may know more."""
    version = capture(["g++", "-dumpversion"]) or ""
    return f"-DMODELCACHE_WERROR={'ON' if version.split('.')[0] == CHECKED_COMPILER else 'OFF'}"


def build(preset="release", *, options=(), targets=()):
    """Configures build/<preset> when needed and builds it; a whole release is installed to its
    prefix as well. Raises DevError."""
    environment.ensure_packages(environment.BUILD_PACKAGES)
    environment.ensure_python()
    env = environment.tool_environment()
    folder = BUILD / preset
    configure = ["cmake", "--preset", preset, f"-DMODELCACHE_PYTHON={environment.python()}"]
    configure += [_warnings() if preset == "release" else "", *options]
    configure = [word for word in configure if word]
    if shutil.which("ccache"):
        configure += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_C_COMPILER_LAUNCHER=ccache"]
    with Step(f"build {preset}"):
        # A changed set of options is the only reason to configure again; ninja sees the rest.
        mark = folder / "dev.configured"
        wanted = "\n".join(configure) + (ROOT / "CMakePresets.json").read_text(encoding="utf-8")
        if not mark.exists() or mark.read_text(encoding="utf-8") != wanted:
            run(configure, env=env, log=STATE / "log" / f"configure-{preset}.log")
            mark.write_text(wanted, encoding="utf-8")
        command = ["cmake", "--build", folder, "-j", jobs()]
        if targets:
            command += ["--target", *targets]
        run(command, env=env, log=STATE / "log" / f"build-{preset}.log")
        if preset == "release" and not targets:
            install_prefix()


def install_prefix():
    """Installs build/release into build/release/prefix: what `./dev env` lets CMake find.

    Files that did not change are not written again.
    """
    run(["cmake", "--install", BUILD / "release", "--prefix", BUILD / "release" / "prefix"],
        env=environment.tool_environment(), log=STATE / "log" / "install.log")
