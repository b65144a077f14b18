"""Modules, functions, hooks, TorchScript and other objects through the serialiser."""

import functools
import pickle
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch
from modelcache._serialise import Uncacheable, dump, fingerprint, load_back, structure
from modelcache._verify import verify

from cachetest.daemon import ROOT, clean_environment
from cachetest.streams import Arena, reload, round_trip, storage_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.register_buffer("k", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.b(self.a(x)) + self.k


def same_output(one, other, *shape):
    x = torch.ones(*(shape or (1, 3)))
    assert torch.equal(one(x), other(x))


def refused(value, path, why):
    with pytest.raises(Uncacheable, match=why) as caught:
        verify(value, load_back(dump(value)))
    assert caught.value.path == path
    return caught.value


# ---- modules ------------------------------------------------------------------------------------


def test_a_module_is_whole():
    net = Net().eval()
    again = round_trip(net)
    assert type(again) is Net and not again.training
    assert list(again.state_dict()) == list(net.state_dict())
    assert list(again.__dict__) == list(net.__dict__)
    same_output(net, again)
    again.added = torch.nn.Linear(1, 1)
    again.register_forward_hook(times_two)
    assert not torch.equal(again(torch.ones(1, 3)), net(torch.ones(1, 3)))


def test_attribute_names_are_interned():
    again = round_trip(Net())
    assert all(name is sys.intern(name) for name in again.__dict__)
    assert all(name is sys.intern(name) for name in again._modules)


def test_tied_weights_as_one_object_and_as_one_storage():
    same = Net()
    same.b.weight = same.a.weight
    again = round_trip(same)
    assert again.b.weight is again.a.weight
    storage = Net()
    storage.b.weight = torch.nn.Parameter(storage.a.weight.data)
    again = round_trip(storage)
    assert again.b.weight is not again.a.weight
    assert again.b.weight.data_ptr() == again.a.weight.data_ptr()
    again.a.weight.data[0, 0] = 7
    assert again.b.weight[0, 0] == 7
    assert storage_bytes(same) == storage_bytes(storage) == 36 + 12


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.LSTM(3, 4, 2),
        lambda: torch.nn.GRU(3, 4, bidirectional=True),
        lambda: torch.nn.MultiheadAttention(4, 2),
        lambda: torch.nn.TransformerEncoderLayer(4, 2, 8),
        lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)),
        lambda: torch.nn.ParameterList([torch.ones(2), torch.zeros(3)]),
        lambda: torch.nn.LazyLinear(3),
        lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(3, 3)).eval(),
    ],
)
def test_modules_with_states_of_their_own(make):
    value = make()
    if isinstance(value, torch.nn.RNNBase):
        value.flatten_parameters()
    try:
        again = round_trip(value)
    except Uncacheable as failure:
        assert failure.path == "weight"  # computed from others, by autograd
        return
    assert type(again) is type(value) and list(again.state_dict()) == list(value.state_dict())


def test_weight_norm_is_derived_anew():
    module = torch.nn.utils.weight_norm(torch.nn.Linear(5, 7))
    again = round_trip(module)
    assert [name for name, _ in again.named_parameters()] == ["bias", "weight_g", "weight_v"]
    assert torch.equal(again.weight, module.weight)
    assert again.weight.grad_fn is not None
    same_output(module, again, 1, 5)
    with torch.no_grad():
        again.weight_g.mul_(2)
    assert not torch.equal(again(torch.ones(1, 5)), module(torch.ones(1, 5)))


def test_parametrizations_are_injected_anew():
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(5, 7))
    again = round_trip(module)
    assert type(again).__name__ == "ParametrizedLinear"
    assert isinstance(again, torch.nn.Linear)
    same_output(module, again, 1, 5)
    torch.nn.utils.parametrize.remove_parametrizations(again, "weight")
    assert type(again) is torch.nn.Linear
    assert torch.equal(again.weight, module.weight)


def test_a_compiled_module_is_refused_with_advice():
    net = Net()
    net.b.compile()
    refused({"net": torch.compile(Net())}, "['net']", "compile it after loading")
    refused(net, "b", "compile it after loading")


# ---- hooks, functions, methods ------------------------------------------------------------------


def times_two(module, arguments, output):
    return output * 2


def test_hooks_run_and_later_ones_do_not_take_their_place():
    module = torch.nn.Linear(2, 2)
    for _ in range(3):
        module.register_forward_hook(times_two)
    dumped = dump(module)
    code = """
import sys, pickle, torch
from modelcache._serialise import load
stream, storages = pickle.load(sys.stdin.buffer)
storages = [torch.tensor(list(s), dtype=torch.uint8).untyped_storage() for s in storages]
module = load(stream, storages.__getitem__)
before = list(module._forward_hooks)
module.register_forward_hook(print)
assert len(module._forward_hooks) == len(before) + 1, module._forward_hooks
"""
    run_with(code, dumped)


def run_with(code, dumped):
    """Runs code in a fresh process that reads a dump from its standard input."""
    given = (dumped.stream, [bytes(storage.tolist()) for storage in dumped.storages])
    path = [str(ROOT / "client" / "python"), str(ROOT / "tests" / "python")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(given),
        capture_output=True,
        env=clean_environment(PYTHONPATH=":".join(path)),
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_a_partial_that_shadows_a_method_is_bound_to_the_new_object():
    module = torch.nn.Embedding(4, 2)
    module.forward = functools.partial(torch.nn.Embedding.forward, module)
    again = round_trip(module)
    with torch.no_grad():
        again.weight.fill_(9)
    assert again(torch.tensor([0])).tolist() == [[9, 9]]
    assert not torch.equal(module(torch.tensor([0])), again(torch.tensor([0])))


def test_a_method_that_shadows_a_method():
    module = torch.nn.Embedding(4, 2)
    module.forward = types.MethodType(lambda self, x: self.weight[x] + 1, module)
    again = round_trip(module)
    assert again.forward.__self__ is again
    assert torch.equal(again(torch.tensor([1])), module(torch.tensor([1])))


def test_local_functions_live_in_their_module():
    seen = []

    def outer(n):
        seen.append(n)
        return 1 if n == 0 else n * outer(n - 1)

    again, list_again = round_trip([outer, seen])
    assert again(4) == 24
    assert list_again == [4, 3, 2, 1, 0] and seen == []
    assert again.__globals__ is globals() and again.__code__ == outer.__code__


def test_what_python_hangs_on_objects():
    local = threading.local()
    local.value = [1]
    net = Net()
    net.deep = {"local": local, "weak": weakref.ref(net.a), "sentinel": SENTINEL}
    net.own = object()
    again = round_trip(net)
    assert again.deep["local"].value == [1]
    assert again.deep["weak"]() is again.a
    assert again.deep["sentinel"] is SENTINEL
    assert again.own is not net.own


SENTINEL = object()


@pytest.mark.parametrize(
    "make, why",
    [
        (threading.Lock, "a lock cannot travel"),
        (lambda: open(__file__), "cannot travel"),
        (lambda: (n for n in range(3)), "cannot travel"),
        (lambda: weakref.ref(Net()), "dead"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(make, why):
    net = Net()
    net.b.hooks = [1, {"x": make()}]
    refused({"unet": net}, "['unet'].b.hooks[1]['x']", why)


# ---- what pickling would lose -------------------------------------------------------------------


class Forgets:
    def __init__(self):
        self.kept, self.lost = 1, 2

    def __getstate__(self):
        return {"kept": self.kept}


class Twin:
    def __init__(self):
        self.one = self.other = [1]

    def __reduce__(self):
        return _twin, (list(self.one), list(self.other))


def _twin(one, other):
    made = Twin()
    made.one, made.other = one, other
    return made


class Strict(dict):
    def __init__(self, *, needed):
        super().__init__(needed=needed)
        self.needed = needed

    def __reduce__(self):
        return Strict, ()


class Rewrites:
    def __init__(self, tensor):
        self.tensor = tensor

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.tensor.zero_()


def test_losses_are_found_when_the_entry_is_made():
    refused([Forgets()], "[0].lost", "lost")
    refused({"x": Twin()}, "['x'].other", "comes back as two")
    refused([Strict(needed=torch.ones(2))], "", "cannot be made again.*needed")
    refused(Rewrites(torch.ones(2)), "", "write to its tensors")


def test_the_order_of_items_is_kept_and_that_of_attributes_does_not_matter():
    value = {"b": 1, "a": {2: 3, 1: 2}}
    assert list(round_trip(value)) == ["b", "a"]
    with pytest.raises(Uncacheable, match="another order"):
        verify({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_floats_are_compared_to_the_bit():
    verify([float("nan"), -0.0], [float("nan"), -0.0])
    with pytest.raises(Uncacheable, match="-0.0 comes back as 0.0"):
        verify([-0.0], [0.0])


# ---- TorchScript --------------------------------------------------------------------------------


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def traced(net):
    return torch.jit.trace(net, torch.ones(1, 3))


@pytest.mark.parametrize("make", [torch.jit.script, traced])
def test_script_modules_share_their_storages(make):
    script = make(Net().eval())
    dumped = dump(script)
    assert sum(storage.nbytes() for storage in dumped.storages) == 36 * 2 + 12
    again = round_trip({"m": script, "plain": script.a.weight})
    same_output(script, again["m"])
    assert again["m"].a.weight.data_ptr() == again["plain"].data_ptr()
    assert type(again["m"]) is type(script)


def test_the_constants_of_a_frozen_module_are_not_in_the_stream():
    net = torch.nn.Sequential(torch.nn.Linear(200, 200)).eval()
    frozen = torch.jit.freeze(torch.jit.script(net))
    dumped = dump(frozen)
    assert len(dumped.stream) < 40_000 <= sum(storage.nbytes() for storage in dumped.storages)
    same_output(frozen, round_trip(frozen), 1, 200)


def test_script_functions_by_name_and_by_content():
    def local(x: torch.Tensor) -> torch.Tensor:
        return x + 3

    named, own = round_trip([scripted, torch.jit.script(local)])
    assert named is scripted
    assert own(torch.ones(2)).tolist() == [4, 4]


# ---- editing ------------------------------------------------------------------------------------


def edits():
    def weights(net):
        with torch.no_grad():
            net.a.weight.add_(1)

    def data(net):
        net.a.weight.data = torch.zeros(3, 3)

    def module(net):
        net.b = torch.nn.Identity()

    def attribute(net):
        net.b.extra = 1

    def mode(net):
        net.eval()

    def hook(net):
        net.a.register_forward_hook(times_two)

    def grad(net):
        net.a.weight.requires_grad_(False)

    return [weights, data, module, attribute, mode, hook, grad]


@pytest.mark.parametrize("edit", edits(), ids=lambda edit: edit.__name__)
def test_a_fingerprint_tells_an_edit(edit):
    net = Net()
    before = fingerprint(net)
    net(torch.ones(1, 3))
    assert fingerprint(net) == before
    edit(net)
    assert fingerprint(net) != before


def test_the_structure_is_the_same_in_another_process():
    value = {"net": torch.nn.Linear(3, 3), "names": {"a", "b", "c", "dd"}, "n": [1, "x"]}
    dumped = dump(value)
    here = structure(reload(dumped)).digest.hex()
    code = """
import sys, pickle, torch
from modelcache._serialise import load, structure
stream, storages = pickle.load(sys.stdin.buffer)
storages = [torch.tensor(list(s), dtype=torch.uint8).untyped_storage() for s in storages]
print(structure(load(stream, storages.__getitem__)).digest.hex())
"""
    assert run_with(code, dumped).strip() == here
    assert structure(load_back(dumped)).digest.hex() == here


def test_two_loads_are_independent():
    dumped = dump(Net())
    arenas = [Arena(dumped), Arena(dumped)]
    one, other = (reload(dumped) for _ in arenas)
    with torch.no_grad():
        one.a.weight.zero_()
    assert other.a.weight.abs().sum() > 0
    assert one.a is not other.a
