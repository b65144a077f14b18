"""Patching: which functions go through the cache, when, and that nothing else about them changes.

Each test is a process of its own. In most the cache is a stand-in that notes the calls.
"""

import os
import subprocess
import sys
import textwrap

import pytest

import modelcache

PACKAGE = os.path.dirname(os.path.dirname(modelcache.__file__))

STAND_IN = """
import sys, types
sys.path[:0] = [{package!r}, {folder!r}]
import modelcache
seen = []
stand_in = types.ModuleType("modelcache._cached")
def call(function, args, kwargs):
    seen.append((function, args, kwargs))
    return ("cached", function(*args, **kwargs))
def overridden(function, shown, *args, **kwargs):
    seen.append(("overridden", shown))
    return function(*args, **kwargs)
stand_in.call, stand_in.overridden = call, overridden
sys.modules["modelcache._cached"] = modelcache._cached = stand_in
"""

LIBRARY = {
    "lib/__init__.py": "from lib.core import load, Base\nfrom lib import core\n",
    "lib/core.py": """
        def load(path, *, fast=False):
            "Loads."
            return path

        class Base:
            @classmethod
            def of_class(cls, path):
                return cls.__name__, path

            @staticmethod
            def of_none(path):
                return path

            def of_object(self, path):
                return type(self).__name__, path

        class Below(Base):
            pass

        class Over(Base):
            @classmethod
            def of_class(cls, path):
                return "over", super().of_class(path)
    """,
    "user.py": "from lib import load\nfrom lib.core import Base\n",
}


@pytest.fixture
def run(tmp_path):
    """Runs a script beside a small library; gives what it prints."""
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))

    def run(script, *, stand_in=True, **environment):
        start = STAND_IN.format(package=PACKAGE, folder=str(tmp_path)) if stand_in else ""
        (tmp_path / "script.py").write_text(start + textwrap.dedent(script))
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def test_patch_all_imports_no_library_and_is_quick(run):
    out = run(
        """
        import sys, time
        before = set(sys.modules)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            modelcache.patch_all()
            times.append(time.perf_counter() - start)
            modelcache.unpatch_all()
        heavy = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(heavy & {"torch", "transformers", "diffusers", "numpy", "safetensors", "tomllib"})
        print("quick" if min(times) < 0.01 else times)
        """
    )
    assert out == "set()\nquick\n"


def test_import_of_the_package_brings_no_torch(run):
    assert run("print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_function_is_patched_wherever_it_was_imported(run, when):
    """Names that were imported before the call, in packages and in the script itself, are covered."""
    imports = "import lib, user\nfrom lib.core import load\n"
    patch = "modelcache.patch('lib.core:load')\n"
    out = run(
        (imports + patch if when == "before" else patch + imports)
        + textwrap.dedent("""
        for function in (lib.load, lib.core.load, user.load, load):
            print(function("x", fast=True))
        print(len(seen), seen[0][1:], {each[0].__module__ for each in seen})
        """)
    )
    assert out == "('cached', 'x')\n" * 4 + "4 (('x',), {'fast': True}) {'lib.core'}\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_kinds_of_methods_are_kept(run, when):
    imports = "from lib.core import Base, Below\n"
    patches = "".join(
        f"modelcache.patch('lib.core:Base.{name}')\n" for name in ("of_class", "of_none", "of_object")
    )
    out = run(
        (imports + patches if when == "before" else patches + imports)
        + textwrap.dedent("""
        print({name: type(vars(Base)[name]).__name__ for name in ("of_class", "of_none", "of_object")})
        print(Base.of_class("x"), Below.of_class("x"), Below().of_class("x"))
        print(Base.of_none("x"), Below().of_none("x"))
        print(Below().of_object("x"), Base.of_object(Below(), "x"))
        print(seen[1][0].__self__.__name__)
        """)
    )
    assert out.splitlines() == [
        "{'of_class': 'classmethod', 'of_none': 'staticmethod', 'of_object': 'function'}",
        "('cached', ('Base', 'x')) ('cached', ('Below', 'x')) ('cached', ('Below', 'x'))",
        "('cached', 'x') ('cached', 'x')",
        "('cached', ('Below', 'x')) ('cached', ('Below', 'x'))",
        "Below",
    ]


def test_subclasses_that_override_are_covered(run):
    """Those that are there, those made later, and those whose method calls the one above."""
    out = run(
        """
        from lib.core import Base, Over
        modelcache.patch("lib.core:Base.of_class")
        class Later(Over):
            @classmethod
            def of_class(cls, path):
                return "later"
        print(Over.of_class("x"), len(seen))
        print(Later.of_class("x"), len(seen))
        """
    )
    assert out == "('cached', ('over', ('cached', ('Over', 'x')))) 2\n('cached', 'later') 3\n"


def test_method_that_a_class_gets_afterwards_is_reported(run):
    out = run(
        """
        from lib.core import Base, Below
        modelcache.patch("lib.core:Base.of_class")
        above = Below.of_class
        Below.of_class = classmethod(lambda cls, path: ("odd", above(path)))
        print(Below.of_class("x"), seen)
        """
    )
    assert out == "('odd', ('Below', 'x')) [('overridden', 'lib.core:Below.of_class')]\n"


def test_subclass_hooks_of_the_class_still_run(run):
    out = run(
        """
        class Base:
            made = []
            def __init_subclass__(cls, tag=None, **rest):
                super().__init_subclass__(**rest)
                Base.made.append((cls.__name__, tag))
            @classmethod
            def load(cls): return 1
        __import__("lib").Base = Base
        modelcache.patch("lib:Base.load")
        class Sub(Base, tag="t"): pass
        print(Base.made, "__init_subclass__" in vars(Base))
        modelcache.unpatch_all()
        class Other(Base, tag="u"): pass
        print(Base.made)
        """
    )
    assert out == "[('Sub', 't')] True\n[('Sub', 't'), ('Other', 'u')]\n"


def test_names_texts_signatures_and_pickles_are_kept(run):
    out = run(
        """
        import inspect, pickle
        modelcache.patch("lib.core:load")
        modelcache.patch("lib.core:Base.of_class")
        from lib.core import load, Base
        print(load.__name__, load.__qualname__, load.__module__, load.__doc__, inspect.signature(load))
        print(inspect.signature(Base.of_class), pickle.loads(pickle.dumps(load)) is load)
        print(pickle.loads(pickle.dumps(Base.of_class))("x"))
        print(inspect.getsource(sys.modules["lib.core"]).strip().splitlines()[0])
        import lib.core
        print(type(lib.core.__spec__.loader).__name__, "exec_module" in vars(lib.core.__loader__))
        """
    )
    assert out.splitlines() == [
        "load load lib.core Loads. (path, *, fast=False)",
        "(path) True",
        "('cached', ('Base', 'x'))",
        "def load(path, *, fast=False):",
        "SourceFileLoader False",
    ]


def test_unpatch_puts_everything_back(run):
    out = run(
        """
        import lib, user
        from lib.core import Base, Below, Over
        before = (lib.load, user.load, dict(vars(Base)), dict(vars(Below)), dict(vars(Over)))
        finders = list(sys.meta_path)
        modelcache.patch_all()
        modelcache.patch("lib.core:load")
        for name in ("of_class", "of_none", "of_object"):
            modelcache.patch(f"lib.core:Base.{name}")
        modelcache.patch("lib.core:Below.of_class")
        kept = lib.load
        modelcache.unpatch_all()
        print((lib.load, user.load, dict(vars(Base)), dict(vars(Below)), dict(vars(Over))) == before)
        print(sys.meta_path == finders, kept("x"))
        modelcache.patch("lib.core:load")
        print(lib.load("x"))
        """
    )
    assert out == "True\nTrue x\n('cached', 'x')\n"


def test_patching_twice_is_patching_once(run):
    out = run(
        """
        import lib
        modelcache.patch("lib.core:load"); once = lib.load
        modelcache.patch("lib.core:load")
        print(lib.load is once)
        """
    )
    assert out == "True\n"


@pytest.mark.parametrize("text", ["lib", "lib:", ":load", "lib..core:load", "lib.core:load()", "a b:c", ""])
def test_points_that_make_no_sense_are_refused(text):
    with pytest.raises(ValueError, match="patch point"):
        modelcache.patch(text)


def test_unknown_library_is_refused_with_those_known():
    with pytest.raises(ValueError, match="transformers"):
        modelcache.patch_all("tensorflow")


def test_only_the_named_libraries_are_patched(run):
    out = run(
        """
        from modelcache import _patch
        modelcache.patch_all("safetensors", "torch")
        print(sorted(_patch._pending))
        """
    )
    assert out == "['safetensors.torch', 'torch.jit._serialization', 'torch.serialization']\n"


def test_user_points_that_are_not_there_are_warned_of(run):
    out = run("modelcache.patch('lib.core:nothing')\nimport lib\nprint(lib.load('x'))\n")
    assert "no lib.core:nothing to patch" in out and out.count("Warning") == 1 and "\nx\n" in "\n" + out


def test_points_of_pyproject_and_overmind_cfg(run, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.other]\npatch = ["lib.core:Base.of_none"]\n[tool.modelcache]\n'
        'patch = [\n  "lib.core:load",  # one\n]\n'
    )
    (tmp_path / "overmind.cfg").write_text("# mine\nlib.core::Base.of_class  # this\n\n")
    out = run(
        """
        modelcache.patch_all()
        from lib.core import load, Base
        print(load("x"), Base.of_class("x"), Base.of_none("x"))
        """
    )
    assert out == "('cached', 'x') ('cached', ('Base', 'x')) x\n"


def test_points_of_pyproject_without_a_parser_for_it():
    """Python 3.9 and 3.10 have none."""
    text = '[a]\npatch = ["no:no"]\n[tool.modelcache]\n# patch = ["x:y"]\npatch = [ "a.b:c",\n \'d:e.f\' ]\n[b]\n'
    from modelcache import _patch_points

    expected = _patch_points._toml(text)["tool"]["modelcache"]["patch"]
    version, sys.version_info = sys.version_info, (3, 9)
    try:
        found = _patch_points._toml(text)["tool"]["modelcache"]["patch"]
    finally:
        sys.version_info = version
    assert found == expected == ["a.b:c", "d:e.f"]


def test_pyproject_with_something_else_under_patch_is_named(run, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.modelcache]\npatch = 3\n")
    out = run("try: modelcache.patch_all()\nexcept ValueError as failure: print(failure)\n")
    assert "pyproject.toml" in out and "list" in out


def test_threads_that_import_at_once_get_patched_functions(run):
    out = run(
        """
        import threading
        modelcache.patch("lib.core:load")
        found = []
        def work():
            from lib import load
            found.append(load("x"))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(set(found), len(found))
        """
    )
    assert out == "{('cached', 'x')} 8\n"


def test_torch_and_safetensors_are_patched_when_imported(run):
    out = run(
        """
        modelcache.patch_all()
        import torch, safetensors.torch
        from torch import load
        torch.save({"w": torch.ones(2)}, "w.pt")
        safetensors.torch.save_file({"w": torch.ones(2)}, "w.safetensors")
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), "w.ts")
        for function, path in ((torch.load, "w.pt"), (load, "w.pt"),
                               (safetensors.torch.load_file, "w.safetensors"), (torch.jit.load, "w.ts")):
            print(function(path)[0])
        """,
        PYTHONWARNINGS="ignore",
    )
    assert out == "cached\n" * 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_classes_of_transformers_are_patched(run, when):
    pytest.importorskip("transformers")
    imports = "import transformers\nfrom transformers import LlamaForCausalLM, AutoModelForCausalLM, pipeline\n"
    patch = "modelcache.patch_all()\n"
    out = run(
        (imports + patch if when == "before" else patch + imports)
        + textwrap.dedent("""
        from modelcache import _cached
        def call(function, args, kwargs):
            return getattr(function, "__self__", function).__name__
        _cached.call = call
        from transformers import (AutoModel, AutoProcessor, AutoTokenizer, BertModel, T5ForConditionalGeneration,
            BertTokenizerFast, CLIPImageProcessor, CLIPProcessor, RagModel, AutoImageProcessor)
        for kind in (LlamaForCausalLM, AutoModelForCausalLM, AutoModel, AutoTokenizer, AutoProcessor, BertModel,
                     T5ForConditionalGeneration, BertTokenizerFast, CLIPProcessor, RagModel, AutoImageProcessor):
            print(kind.from_pretrained("x") == kind.__name__, kind.__name__)
        print(pipeline("x"), transformers.pipeline("x"))
        """),
    )
    lines = [line for line in out.splitlines() if line.startswith(("True", "False", "pipeline"))]
    assert len(lines) == 12 and lines[-1] == "pipeline pipeline", out
    assert not [line for line in lines if line.startswith("False")]


@pytest.mark.parametrize("when", ["before", "after"])
def test_classes_of_diffusers_are_patched(run, when):
    pytest.importorskip("diffusers")
    imports = "from diffusers import StableDiffusionPipeline\n"
    patch = "modelcache.patch_all()\n"
    out = run(
        (imports + patch if when == "before" else patch + imports)
        + textwrap.dedent("""
        from modelcache import _cached
        def call(function, args, kwargs):
            return getattr(function, "__self__", function).__name__
        _cached.call = call
        from diffusers import (AutoencoderKL, ControlNetModel, DDIMScheduler, DiffusionPipeline,
            UNet2DConditionModel, AutoPipelineForText2Image)
        for kind in (StableDiffusionPipeline, AutoencoderKL, ControlNetModel, DDIMScheduler, DiffusionPipeline,
                     UNet2DConditionModel, AutoPipelineForText2Image):
            print(kind.from_pretrained("x") == kind.__name__, kind.__name__)
        for kind in (StableDiffusionPipeline, AutoencoderKL, ControlNetModel):
            print(kind.from_single_file("x") == kind.__name__, kind.__name__)
        """),
    )
    lines = [line for line in out.splitlines() if line.startswith(("True", "False"))]
    assert len(lines) == 10 and not [line for line in lines if line.startswith("False")], out
