"""The demo: what it prints where no person looks, and that what it suggests works."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "demo"), str(ROOT / "client" / "python")]

import demo  # noqa: E402
from lab import report  # noqa: E402


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_a_terminal_only(monkeypatch, terminal):
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    printer = report.Printer(to_stderr=False)
    with printer.progress("cold load") as progress:
        progress(0, 0)
        progress(1, 2)
        progress(2, 2)
    printer.line("what follows")
    assert ("100%" in out.getvalue()) == terminal
    assert out.getvalue().endswith(("\033[K" if terminal else "") + "what follows\n")


def test_what_the_demo_suggests_works_when_pasted_anywhere(tmp_path):
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "a folder"
    folder.mkdir()
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    commands = [command for command, _ in demo.next_commands(folder, "w") if " bench " not in command]
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)], cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
        env=dict({k: v for k, v in os.environ.items() if k != "MODELCACHE_AUTOSTART"},
                 MODELCACHE_SOCKET=str(tmp_path / "socket")),
    )
    assert done.returncode == 0, done.stdout
    assert "tensor([0., 1., 2., 3.])" in done.stdout
    ctl = ROOT / "build" / "release" / "bin" / "modelcachectl"
    assert subprocess.run([ctl, "--socket", tmp_path / "socket", "status"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          env=dict(os.environ, MODELCACHE_AUTOSTART="0"), check=False).returncode == 3
