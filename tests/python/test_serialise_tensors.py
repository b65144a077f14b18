"""Tensors through the serialiser: what they are, what they share, what hangs on them."""

import pytest
import torch
from modelcache._serialise import Uncacheable, dump

from cachetest.streams import reload, round_trip, storage_bytes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DTYPES = {
    torch.uint16: 65535,
    torch.uint32: 4294967295,
    torch.uint64: 2**63,
    torch.float8_e4m3fn: 448,
    torch.float8_e5m2: 57344,
    torch.complex32: 1 + 2j,
    torch.bfloat16: -0.0,
    torch.bool: True,
    torch.int8: -128,
    torch.float64: 0.1,
}


def raw(tensor):
    return bytes(tensor.untyped_storage().tolist())


def test_a_plain_tensor_keeps_values_dtype_and_layout():
    source = torch.arange(6.0).view(2, 3)
    for value in (source, source.t(), source[:, 1:], source.as_strided((2, 2), (1, 1), 2)):
        again = round_trip(value)
        assert torch.equal(again, value)
        assert (again.stride(), again.storage_offset()) == (value.stride(), value.storage_offset())
        assert again.untyped_storage().nbytes() == value.untyped_storage().nbytes()
        assert again._base is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bytes(dtype):
    values = torch.tensor([DTYPES[dtype]] * 3, dtype=dtype)
    whole, part = round_trip([values, values.clone()[1:]])
    assert whole.dtype is part.dtype is dtype
    assert raw(whole) == raw(part) == raw(values)


def test_conjugate_and_negative_views_keep_their_values():
    value = {
        "c": torch.tensor([1 + 2j, 3 + 4j]).conj(),
        "n": torch._neg_view(torch.tensor([1.0, 3.0])),
    }
    again = round_trip(value)
    assert again["c"].tolist() == [1 - 2j, 3 - 4j] and again["c"].is_conj()
    assert again["n"].tolist() == [-1, -3] and again["n"].is_neg()


def test_one_storage_seen_as_two_dtypes_stays_one():
    a = torch.tensor([1 + 2j, 3 + 4j])
    whole, real, imag = round_trip([a, a.real, a.imag])
    assert (whole.dtype, real.dtype, imag.dtype) == (torch.complex64, torch.float32, torch.float32)
    assert (real.stride(), real.storage_offset()) == ((2,), 0)
    assert (imag.stride(), imag.storage_offset()) == ((2,), 1)
    assert storage_bytes([a, a.real, a.imag]) == 16
    whole[0] = 9
    assert real[0] == 9


def test_equal_tensors_that_were_separate_stay_separate():
    one, other = round_trip([torch.ones(4), torch.ones(4)])
    one.add_(1)
    assert other.tolist() == [1] * 4


def test_storages_that_overlap_still_do():
    base = torch.arange(100, dtype=torch.uint8).untyped_storage()
    parts = [torch.empty(0, dtype=torch.uint8).set_(base[a : a + 40]) for a in (0, 20)]
    assert storage_bytes(parts) == 60
    one, other = round_trip(parts)
    assert (one.tolist(), other.tolist()) == (list(range(40)), list(range(20, 60)))
    one[25] = 200
    assert other[5] == 200


def test_a_small_view_keeps_its_whole_storage_once():
    big = torch.zeros(1000)
    one, other = round_trip([big[:10], big[5:7]])
    assert storage_bytes([big[:10], big[5:7]]) == 4000
    assert one.untyped_storage().nbytes() == 4000
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata


def test_empty_tensors_take_no_memory():
    value = [
        torch.empty(0, 100),
        torch.tensor([]),
        torch.zeros(3, 0),
        torch.zeros(4)[:0],
        torch.tensor(3.5),
    ]
    again = round_trip(value)
    assert [tuple(t.shape) for t in again] == [(0, 100), (0,), (3, 0), (0,), ()]
    assert [t.stride() for t in again] == [(100, 1), (1,), (1, 1), (1,), ()]
    assert [t.untyped_storage().nbytes() for t in again] == [0, 0, 0, 16, 4]
    assert storage_bytes([torch.tensor([])]) == 0


def test_meta_tensors_stay_without_data():
    value = torch.nn.Linear(2, 3, device="meta")
    value.register_buffer("real", torch.ones(2))
    again = round_trip(value)
    assert again.weight.device.type == "meta"
    assert (tuple(again.weight.shape), again.weight.stride()) == ((3, 2), (2, 1))
    assert again.real.tolist() == [1, 1]
    assert storage_bytes(value) == 8


def test_sparse_tensors_keep_layout_and_share_their_parts():
    dense = torch.tensor([[0, 0, 3.0], [4.0, 0, 0]])
    value = [
        torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (2, 3)),
        torch.sparse_coo_tensor([[0, 0], [2, 2]], [1.0, 2.0], (2, 3)),
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
    ]
    for one, again in zip(value, round_trip(value)):
        assert again.layout is one.layout
        assert torch.equal(again.to_dense(), one.to_dense())
        if one.layout is torch.sparse_coo:
            assert again.is_coalesced() == one.is_coalesced()
            assert again._indices().dtype is torch.int64


def test_quantised_tensors_keep_their_quantiser():
    value = [
        torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 3, torch.qint8),
        torch.quantize_per_channel(torch.ones(4, 3), torch.rand(4), torch.ones(4), 0, torch.quint8),
    ]
    per_tensor, per_channel = round_trip(value)
    assert torch.equal(per_tensor.int_repr(), value[0].int_repr())
    assert (per_tensor.q_scale(), per_tensor.q_zero_point()) == (0.1, 3)
    assert torch.equal(per_channel.dequantize(), value[1].dequantize())
    assert per_channel.q_per_channel_axis() == 0


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout):
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
    again = round_trip(value)
    assert again.layout is layout
    assert [t.tolist() for t in again.unbind()] == [t.tolist() for t in value.unbind()]


def test_inference_tensors_stay_so():
    with torch.inference_mode():
        value = torch.ones(3)
    assert round_trip(value).is_inference()


def test_requires_grad_and_integer_parameters():
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.ones(2))
    module.b = torch.nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    again = round_trip(module)
    assert type(again.a) is type(again.b) is torch.nn.Parameter
    assert again.a.requires_grad and not again.b.requires_grad
    assert again.b.dtype is torch.int64 and again.b.tolist() == [1, 2]
    (again.a * 3).sum().backward()
    assert again.a.grad.tolist() == [3, 3]


def test_a_gradient_stays_behind():
    x = torch.tensor([2.0], requires_grad=True)
    (x * x).backward()
    again = round_trip(x)
    assert again.tolist() == [2.0] and again.requires_grad and again.grad is None
    assert storage_bytes(x) == 4


def test_a_result_of_autograd_is_refused():
    with pytest.raises(Uncacheable, match="grad_fn") as caught:
        dump({"a": [torch.ones(2, requires_grad=True) * 2]})
    assert caught.value.path == "['a'][0]"


def test_attributes_of_parameters_and_tensors():
    module = torch.nn.Linear(2, 2)
    module.weight.tag = "bar"
    module.bias.more = {"x": module.weight}
    again = round_trip(module)
    assert again.weight.tag == "bar"
    assert again.bias.more["x"] is again.weight


def double(grad):
    return grad * 2


def test_a_backward_hook_runs():
    value = torch.ones(2, requires_grad=True)
    value.register_hook(double)
    again = round_trip(value)
    again.sum().backward()
    assert again.grad.tolist() == [2, 2]


class Quantised(torch.nn.Parameter):
    """Its own pickling changes the original, as libraries have it."""

    def __getstate__(self):
        self.__dict__["data_"] = self.data
        return self.__dict__

    def __setstate__(self, state):
        raise NotImplementedError


def test_a_parameter_class_keeps_its_state_and_is_left_alone():
    module = torch.nn.Module()
    module.w = Quantised(torch.ones(2), requires_grad=False)
    module.w.qs = {"absmax": torch.ones(3)}
    module.v = module.w
    again = round_trip(module)
    assert type(again.w) is Quantised and again.v is again.w
    assert again.w.qs["absmax"].tolist() == [1, 1, 1]
    assert set(module.w.__dict__) == {"qs"}


def test_wrapper_subclasses_are_made_from_their_parts():
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    inner = torch.arange(3.0)
    value = [inner, two(inner, torch.zeros(3)), torch.nn.Parameter(two(inner, inner + 1))]
    plain, pair, parameter = round_trip(value)
    assert type(pair) is type(parameter) is two
    assert pair.a is plain and pair.b.tolist() == [0, 0, 0]
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad


class Wrapper(torch.Tensor):
    """Of the shape of torchao's: a scale and integers, with one of them optional."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], {"kind": "int8"}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, shape, stride):
        assert context == {"kind": "int8"}
        return cls(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale)
        raise NotImplementedError(str(function))


def test_a_quantised_wrapper_as_a_parameter():
    value = torch.nn.Module()
    value.w = torch.nn.Parameter(
        Wrapper(torch.ones(4, dtype=torch.int8), torch.tensor(0.5)), requires_grad=False
    )
    again = round_trip(value).w
    assert type(again) is Wrapper and isinstance(again, torch.nn.Parameter)
    assert again.data_.tolist() == [1, 1, 1, 1] and again.scale == 0.5


def test_storages_as_objects():
    tensor = torch.arange(4.0)
    untyped, typed, again = round_trip([tensor.untyped_storage(), tensor.storage(), tensor])
    assert untyped._cdata == again.untyped_storage()._cdata
    assert typed.dtype is torch.float32
    again[0] = 7
    assert typed[0] == 7


def test_an_array_and_the_tensor_over_it_stay_one():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(100_000.0)
    again, tensor, view = round_trip([array, torch.from_numpy(array), array[5:]])
    tensor[7] = -1
    assert again[7] == view[2] == -1
    assert storage_bytes([array, torch.from_numpy(array), array[5:]]) == array.nbytes


def test_temporaries_of_a_reduce_do_not_share_an_address():
    again = round_trip([Temporary(7.0) for _ in range(300)])
    assert all(item.values.tolist() == [7.0] * 100 for item in again)
    again[0].values.zero_()
    assert again[1].values[0] == 7


class Temporary:
    """Pickles a tensor that nobody else holds."""

    def __init__(self, value):
        self.values = torch.full((100,), value)

    def __reduce__(self):
        return _temporary, (self.values.clone(),)


def _temporary(values):
    result = Temporary(0.0)
    result.values = values
    return result


def test_references_are_written_as_names():
    shared = torch.nn.Linear(2, 2)
    dumped = dump({"a": shared, "b": [shared], "c": torch.ones(1)}, {id(shared): "vae"})
    assert sum(storage.nbytes() for storage in dumped.storages) == 4
    mine = torch.nn.Linear(2, 2)
    again = reload(dumped, {"vae": mine})
    assert again["a"] is mine and again["b"][0] is mine


def test_a_part_of_a_reference_elsewhere_is_refused():
    shared = torch.nn.Linear(2, 2)
    value = {"a": shared, "tied": shared.weight}
    with pytest.raises(Uncacheable, match="part of vae") as caught:
        dump(value, {id(shared): "vae"}, {id(shared.weight): "vae", id(shared): "vae"})
    assert caught.value.path == "['tied']"
