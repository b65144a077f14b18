"""What the README shows works as it stands there, against the build."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"
STRICT = "-std=c99 -Wall -Wextra -Wpedantic -Werror"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def block(language, needle):
    """The one example in `language` that has the text `needle`."""
    (found,) = [text for word, text in BLOCKS if word == language and needle in text]
    return found


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs lines in a shell as the README says to set one up, in a folder with its example file."""
    if not (BUILD / "bin").exists():
        pytest.skip("build/release is not built")
    folder = tmp_path_factory.mktemp("reader")
    env = {k: v for k, v in os.environ.items() if not k.startswith("MODELCACHE_") or k == "MODELCACHE_PYTHON"}
    env["MODELCACHE_SOCKET"] = str(folder / "socket")

    def run(lines):
        done = subprocess.run(
            ["bash", "-ec", f'eval "$({ROOT}/dev env)"\n{lines}'], cwd=folder, env=env, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        return done.stdout

    run.folder = folder
    run(block("", "save_file"))
    yield run
    run("modelcachectl shutdown || true")


def test_the_commands(shell):
    text = shell(block("", "modelcachectl why"))
    assert "layer.0.weight" in text


def test_the_python_example(shell):
    (shell.folder / "example.py").write_text(
        block("python", "load_state_dict") + 'print(net["layer"][0].weight.equal(w), w.is_meta)\n')
    assert shell('"$MODELCACHE_PYTHON" example.py').split() == ["True", "False"]


def test_the_c_example_compiles_without_a_warning_and_runs(shell):
    (shell.folder / "tensor.c").write_text(block("c", "mc_model_open"))
    lines = block("", "cc tensor.c").replace("cc ", f"cc {STRICT} ")
    assert shell(f"{lines}./tensor").startswith("layer.0.weight: 2 dimensions, float32, at 0x")


def test_the_project_it_links_is_configured_as_it_says(shell):
    configure = block("", "docs/examples/cpp").split("&&")[0]
    shell(configure.replace("-S ", f"-S {ROOT}/"))
