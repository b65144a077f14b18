"""The key of a call: the same for calls that must give the same, another for all others."""

import collections
import dataclasses
import enum
import functools
import io
import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch

from modelcache import _key, _key_values
from modelcache._key import DoesNotFit, Unkeyable, describe

PACKAGE = os.path.dirname(os.path.dirname(_key.__file__))


def loader(path, *rest, config=None, device_map="cpu", **options):
    return path, rest, config, device_map, options


class Base:
    @classmethod
    def from_pretrained(cls, path):
        return cls, path


class First(Base):
    pass


class Second(Base):
    pass


class Config:
    """Has equality and no hash, as the configurations of transformers."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __eq__(self, other):
        return self.__dict__ == other.__dict__

    __hash__ = None


@dataclasses.dataclass
class Quantization:
    """Declares no field for what it holds, as BitsAndBytesConfig."""

    method: str = "bnb"

    def set(self, **values):
        self.__dict__.update(values)
        return self


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def key(function, *args, **kwargs):
    return describe(function, args, kwargs).key


def parts(function, *args, **kwargs):
    return describe(function, args, kwargs).parts


def test_key_is_32_hexadecimal_digits_and_is_the_same_in_another_process():
    """Fresh hashes of texts and other addresses do not show in it."""
    script = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "import torch\n"
        "from modelcache._key import describe\n"
        "print(describe(torch.load, ('x.pt',), {'map_location': {'a', 'b', 'c'}}).key)\n"
    )
    keys = set()
    for seed in "123":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script, PACKAGE],
            env=environment, capture_output=True, text=True, check=True,
        )
        keys.add(done.stdout.strip())
    (only,) = keys
    assert len(only) == 32 and int(only, 16) >= 0


def test_class_is_in_the_key():
    """Two classes that inherit one method: the known system gives the first one's object for both."""
    assert key(First.from_pretrained, "x") != key(Second.from_pretrained, "x")


def test_keyword_order_and_explicit_defaults_make_no_difference():
    plain = key(loader, "x", a=1, b=2)
    assert key(loader, "x", b=2, a=1) == plain
    assert key(loader, path="x", b=2, device_map="cpu", a=1) == plain
    assert key(loader, "x", a=1, b=2, config=None) == plain


@pytest.mark.parametrize(
    "one, other",
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        (b"x", "x"),
        ((1,), [1]),
        ({1}, frozenset({1})),
        (None, "None"),
        (Colour.RED, Colour.BLUE),
        ({"": 0}, {"": 1}),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [2, 1]}}),
        ([["a"], "b"], [["a", "b"]]),
        ("a', 'b", ["a", "b"]),
        (torch.float16, torch.bfloat16),
        (torch.device("cpu"), torch.device("meta")),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, requires_grad=True)),
        (Config(a=1), Config(a=2)),
        (Config(a=Config(b=1)), Config(a=Config(b=2))),
        (Quantization().set(bits=4), Quantization().set(bits=8)),
        (functools.partial(loader, 1), functools.partial(loader, 2)),
        (First, Second),
        (loader, describe),
        (lambda: 1, lambda: 2),
        (b"x" * 1000 + b"a", b"x" * 1000 + b"b"),
        ("x" * 10000 + "a", "x" * 10000 + "b"),
        (10**50, 10**51),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_differ_have_other_keys(one, other):
    assert key(loader, config=one, path="") != key(loader, config=other, path="")


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": [1, (2, {"b"})], None: b"\0"},
        lambda: collections.OrderedDict(a=1),
        lambda: collections.defaultdict(list, a=[1]),
        lambda: Config(a=1, nested=Config(b=[1])),
        lambda: Quantization("other").set(bits=4),
        lambda: pathlib.PurePath("no/such/file"),
        lambda: torch.arange(6.0).reshape(2, 3).t(),
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.tensor([]),
        lambda: torch.Size([1, 2]),
        lambda: functools.partial(loader, "x", a=Config(b=1)),
        lambda: {1, 2, "three", None},
        lambda: range(3),
        lambda: 2**70,
        lambda: float("nan"),
        lambda: First.from_pretrained,
        lambda: sys,
        lambda: len,
        lambda: torch.float8_e4m3fn,
        lambda: torch.channels_last,
    ],
)
def test_equal_values_made_twice_have_one_key(make):
    assert key(loader, make()) == key(loader, make())


def test_no_value_is_asked_for_its_hash_or_compared():
    class Stubborn:
        def __eq__(self, other):
            raise AssertionError("compared")

        def __hash__(self):
            raise AssertionError("hashed")

    assert key(loader, Stubborn()) == key(loader, Stubborn())


def test_values_that_hold_themselves_end():
    loop = [1]
    loop.append(loop)
    other = [2]
    other.append(other)
    assert key(loader, loop) == key(loader, loop) != key(loader, other)


def test_paths_spelled_in_four_ways_are_one_call_of_torch_load(tmp_path, monkeypatch):
    """B12: a relative and an absolute spelling, as text and as Path."""
    (tmp_path / "a.pt").write_bytes(b"x")
    (tmp_path / "b.pt").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    spellings = ["a.pt", "./a.pt", str(tmp_path / "a.pt"), pathlib.Path("a.pt"), tmp_path / "a.pt"]
    spellings += [f"../{tmp_path.name}/a.pt"]
    assert len({key(torch.load, path) for path in spellings}) == 1
    assert key(torch.load, "b.pt") != key(torch.load, "a.pt")


def test_relative_path_is_another_call_in_another_folder(tmp_path, monkeypatch):
    keys = set()
    for name in ("one", "two"):
        (tmp_path / name / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        keys |= {key(loader, "model"), key(torch.load, "model"), key(loader, {"deep": ["model"]})}
    assert len(keys) == 6


@pytest.mark.parametrize("name", ["token", "use_auth_token", "api_key", "hf_token", "PASSWORD"])
def test_secrets_are_told_apart_and_never_shown(name):
    secret = "sesame-1234567890"
    told = describe(loader, ("x",), {name: secret})
    assert secret not in repr(told)
    assert told.key == key(loader, "x", **{name: secret})
    assert told.key != key(loader, "x", **{name: secret + "1"})
    nested = describe(loader, ("x",), {"config": {name: secret}, "more": Config(**{name: secret})})
    assert secret not in repr(nested)


def test_secrets_of_the_environment_and_in_texts_are_hidden(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_environment1234567890")
    told = describe(loader, ("hf_argument12345678901234",), {"url": "https://me:sesame@host/x"})
    assert not any(word in repr(told) for word in ("environment1234", "argument1234", "sesame"))
    before = told.key
    monkeypatch.setenv("HF_TOKEN", "hf_another1234567890abc")
    assert describe(loader, ("hf_argument12345678901234",), {"url": "https://me:sesame@host/x"}).key != before


def test_names_about_tokens_of_text_are_no_secrets():
    for name in ("tokenizer", "pad_token", "token_type_ids", "max_new_tokens", "eos_token_id"):
        assert not _key_values.is_secret(name), name
    assert parts(loader, "x", pad_token="<pad>")["argument pad_token"] == "'<pad>'"


@pytest.mark.parametrize("name", ["HF_HOME", "TRANSFORMERS_CACHE", "CUDA_VISIBLE_DEVICES", "TORCH_HOME"])
def test_environment_that_loads_depend_on_is_in_the_key(monkeypatch, name):
    monkeypatch.setenv(name, "one")
    before = key(loader, "x")
    monkeypatch.setenv(name, "two")
    assert key(loader, "x") != before


def test_environment_that_only_talks_is_not(monkeypatch):
    before = key(loader, "x")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert key(loader, "x") == before


def test_default_dtype_device_and_grad_mode_are_in_the_key():
    keys = {key(loader, "x")}
    previous = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        keys.add(key(loader, "x"))
    finally:
        torch.set_default_dtype(previous)
    with torch.device("meta"):
        keys.add(key(loader, "x"))
    with torch.no_grad():
        keys.add(key(loader, "x"))
    assert len(keys) == 4
    assert key(loader, "x") in keys


def test_modes_that_watch_calls_are_refused():
    class Watch(torch.overrides.TorchFunctionMode):
        pass

    with Watch(), pytest.raises(Unkeyable, match="Watch"):
        key(loader, "x")
    with torch.inference_mode(), pytest.raises(Unkeyable, match="inference"):
        key(loader, "x")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(Unkeyable):
        key(loader, "x")


def test_code_of_a_function_without_a_name_of_its_own_is_in_the_key():
    def make(number):
        def inner(path):
            return path, number

        return inner

    assert key(make(1), "x") == key(make(1), "x") != key(make(2), "x")


def test_code_of_a_function_of_the_user_is_in_the_key(monkeypatch):
    before = key(loader, "x")

    def changed(path, *rest, config=None, device_map="cpu", **options):
        return path, rest, config, device_map, options, "more"

    monkeypatch.setattr(loader, "__code__", changed.__code__)
    assert key(loader, "x") != before


def test_globals_that_a_script_function_reads_are_in_the_key():
    def made(size):
        names = {"__name__": "__main__", "SIZE": size, "__builtins__": __builtins__}
        exec("def loading(path):\n    return path, SIZE\n", names)
        return names["loading"]

    assert key(made(1), "x") == key(made(1), "x") != key(made(2), "x")


def test_classes_of_a_script_are_keyed_by_what_they_do():
    def made(number):
        names = {"__name__": "__main__", "Base": Base}
        exec(f"class Net(Base):\n    size = {number}\n    def run(self): return {number}\n", names)
        return names["Net"].from_pretrained

    assert key(made(1), "x") == key(made(1), "x") != key(made(2), "x")


@pytest.mark.parametrize(
    "make, needle",
    [
        (lambda path: open(path / "f", "wb"), "open file"),
        (lambda path: io.BytesIO(b"x"), "open file"),
        (lambda path: (n for n in ()), "generator"),
        (lambda path: threading.Lock(), "lock"),
        (lambda path: torch.nn.Linear(1, 1), "Linear that did not come from the cache"),
        (lambda path: torch.Generator(), "Generator"),
        (lambda path: First(), "First that did not come from the cache"),
    ],
    ids=["file", "buffer", "generator", "lock", "module", "random", "tokenizer"],
)
def test_what_has_no_content_is_named(tmp_path, make, needle):
    """B12 and more: the path to it and the reason, for one warning."""
    value = make(tmp_path)
    with pytest.raises(Unkeyable) as caught:
        key(loader, "x", deep={"here": [value]})
    assert caught.value.path == "argument deep['here'][0]"
    assert needle in caught.value.why
    if isinstance(value, io.IOBase):
        value.close()


def test_arguments_that_do_not_fit_are_left_to_the_function():
    with pytest.raises(DoesNotFit):
        key(First.from_pretrained)
    with pytest.raises(DoesNotFit):
        key(Base.from_pretrained, "x", "y")


def test_difference_names_the_part():
    old = parts(loader, "x", dtype=torch.float32, a=1)
    new = parts(loader, "x", dtype=torch.bfloat16, a=1)
    assert _key.difference(old, new) == [
        "argument dtype is dtype torch.bfloat16, was dtype torch.float32"
    ]
    assert _key.difference(old, old) == []
    assert "was not there" in _key.difference(parts(loader, "x"), new)[0]


def test_quantisation_settings_of_transformers_are_in_the_key():
    transformers = pytest.importorskip("transformers")
    settings = [
        {"load_in_4bit": True},
        {"load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16},
    ]
    made = [transformers.BitsAndBytesConfig(**each) for each in settings]
    again = [transformers.BitsAndBytesConfig(**each) for each in settings]
    keys = [key(loader, "x", config=each) for each in made]
    assert len(set(keys)) == len(settings)
    assert keys == [key(loader, "x", config=each) for each in again]


def test_configurations_of_transformers_are_keyed_by_content():
    transformers = pytest.importorskip("transformers")
    make = functools.partial(transformers.LlamaConfig, num_hidden_layers=2, num_attention_heads=2)
    load = transformers.LlamaForCausalLM.from_pretrained
    assert key(load, "x", config=make()) == key(load, "x", config=make())
    assert key(load, "x", config=make()) != key(load, "x", config=make(vocab_size=7))
