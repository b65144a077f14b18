"""The package stays what its metadata promises: readable by Python 3.9, without newer names."""

import ast
import re
import sys

import pytest

from cachetest.processes import PACKAGE

OLDEST = (3, 9)
FILES = sorted(p for p in PACKAGE.rglob("*.py") if "build" not in p.relative_to(PACKAGE).parts)

# What the standard library got after 3.9 and a client of models could reach for.
NEWER_MODULES = {"tomllib"}
NEWER_NAMES = {
    "asyncio": {"TaskGroup", "Runner", "timeout", "Barrier"},
    "contextlib": {"aclosing", "chdir"},
    "dataclasses": {"KW_ONLY"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "EnumCheck", "verify", "member", "nonmember"},
    "hashlib": {"file_digest"},
    "inspect": {"getmembers_static", "get_annotations", "markcoroutinefunction"},
    "itertools": {"pairwise", "batched"},
    "math": {"cbrt", "exp2", "sumprod", "fma"},
    "os": {"eventfd", "EFD_CLOEXEC", "process_cpu_count", "unshare", "setns"},
    "statistics": {"covariance", "correlation", "linear_regression", "kde"},
    "sys": {"orig_argv", "stdlib_module_names", "exception", "activate_stack_trampoline"},
    "threading": {"setprofile_all_threads", "settrace_all_threads", "gettrace", "getprofile"},
    "types": {"NoneType", "EllipsisType", "NotImplementedType", "UnionType", "get_original_bases"},
    "typing": {
        "Concatenate", "LiteralString", "Never", "NotRequired", "ParamSpec", "ParamSpecArgs",
        "Required", "Self", "TypeAlias", "TypeGuard", "TypeVarTuple", "Unpack", "assert_never",
        "assert_type", "dataclass_transform", "is_typeddict", "override", "reveal_type",
    },
}  # fmt: skip
NEWER_KEYWORDS = {("zip", "strict"), ("dataclass", "slots"), ("dataclass", "kw_only")}


def parsed(text, name="module"):
    return ast.parse(text, name, feature_version=OLDEST)


def guarded(tree):
    """The nodes below an `if sys.version_info …` or `if TYPE_CHECKING`, which 3.9 never runs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and re.search("version_info|TYPE_CHECKING", ast.dump(node.test)):
            yield from ast.walk(node)


def newer(tree):
    """Everything in a module that Python 3.9 does not have, as far as it can be told."""
    skipped = set(map(id, guarded(tree)))
    lazy = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in NEWER_MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = NEWER_NAMES.get(node.module or "", set())
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in NEWER_NAMES.get(node.value.id.lstrip("_"), set()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            yield from (f"{called}({k.arg}=)" for k in node.keywords if (called, k.arg) in NEWER_KEYWORDS)
        elif isinstance(node, (ast.arg, ast.AnnAssign)) and not lazy:
            if isinstance(getattr(node, "annotation", None), ast.BinOp):
                yield "X | Y as an annotation that is evaluated"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_is_python_3_9(path):
    assert list(newer(parsed(path.read_text(), str(path)))) == []


def test_the_package_has_files_and_promises_3_9():
    assert PACKAGE / "modelcache" / "__init__.py" in FILES
    assert 'requires-python = ">=3.9"' in (PACKAGE / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "import tomllib",
        "from itertools import pairwise",
        "import os\nos.eventfd(0)",
        "zip(a, b, strict=True)",
        "def f(a: int | None): pass",
    ],
)
def test_newer_names_are_seen(text):
    assert list(newer(parsed(text)))


@pytest.mark.skipif(sys.version_info < (3, 10), reason="this Python knows no match statement")
def test_newer_syntax_is_seen():
    with pytest.raises(SyntaxError):
        parsed("match x:\n    case 1: pass\n")
    with pytest.raises(SyntaxError):
        parsed("try:\n    pass\nexcept* ValueError:\n    pass\n")
