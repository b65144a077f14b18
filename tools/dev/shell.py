"""Running programs and talking to the person at the terminal."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
STATE = ROOT / ".dev"  # caches and stamps; never committed


class DevError(Exception):
    """A failure whose text tells the person what to do."""


def say(text):
    print(f"dev: {text}", file=sys.stderr, flush=True)


def run(command, *, env=None, cwd=ROOT, log=None, hint=None):
    """Runs a program to its end; its output goes to ours, or to the file `log`.

    Raises DevError with the end of the log and `hint` when it fails.
    """
    command = [str(part) for part in command]
    if log is None:
        code = subprocess.run(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL).returncode
        tail = ""
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as out:
            code = subprocess.run(
                command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            ).returncode
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-40:]) if code else ""
    if code:
        text = f"{' '.join(command[:4])} … failed (exit {code})"
        raise DevError("\n".join(part for part in (tail, text, hint) if part))


def capture(command, **kwargs):
    """Standard output of a program, or None when it fails or does not exist."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            text=True,
            **kwargs,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


class Step:
    """Names a step while it runs and says how long it took."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.start = time.monotonic()
        say(f"{self.name} …")
        return self

    def __exit__(self, kind, *_):
        word = "failed after" if kind else "done in"
        say(f"{self.name}: {word} {time.monotonic() - self.start:.1f} s")
        return False


def jobs():
    return len(os.sched_getaffinity(0))
