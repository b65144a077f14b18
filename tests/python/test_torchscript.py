"""TorchScript archives: modules over shared storages, crafted archives."""

import zipfile
from typing import Tuple

import pytest
import torch

from cachetest.files import rezip

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*registered as constants in the trace"),
]


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("k", torch.arange(3.0))

    def forward(self, x):
        return self.b(self.a(x)) + self.k + torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "ts.pt"
    torch.manual_seed(2)
    traced = torch.jit.trace(Tied(), torch.ones(3))
    torch.jit.save(traced, str(path), _extra_files={"info.txt": "hello"})
    with zipfile.ZipFile(path) as records:
        sizes = {i.filename.partition("/")[2]: i.file_size for i in records.infolist()}
    assert (sizes["data/0"], sizes["data/1"], sizes["constants/0"]) == (12, 36, 12)
    return path


def addresses(model):
    """Address ranges of the model's storages in this process."""
    table = model._tables()
    return list(zip(table.addresses, table.storage_bytes))


def inside(tensor, ranges):
    return any(start <= tensor.data_ptr() < start + size for start, size in ranges)


def test_module_runs_over_shared_storages(client, archive):
    """C1"""
    model = client.open(archive)
    module = model.jit()
    direct = torch.jit.load(str(archive))
    x = torch.randn(3)
    assert torch.equal(module(x), direct(x))
    assert module.a.weight.data_ptr() == module.b.weight.data_ptr()
    ranges = addresses(model)
    assert inside(module.a.weight, ranges) and inside(module.k, ranges)
    assert module.a.weight.requires_grad == direct.a.weight.requires_grad
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in direct.named_parameters()]
    assert module.code == direct.code


def test_constants_of_the_graph_are_not_copied(client, archive):
    """C1"""
    model = client.open(archive)
    module = model.jit()
    ranges = addresses(model)
    constants = [
        node.t("value")
        for node in module.graph.findAllNodes("prim::Constant")
        if node.hasAttribute("value") and node.kindOf("value") == "t" and node.t("value").dim() == 1
    ]
    assert [c.tolist() for c in constants] == [[1.0, 2.0, 3.0]]
    assert inside(constants[0], ranges)


def test_names_and_extra_files(client, archive):
    """C1"""
    model = client.open(archive)
    assert model.format == "torchscript"
    assert model.extra_files == {"info.txt": b"hello"}
    assert sum({t.storage: t.storage_bytes for t in model.tensors()}.values()) == 48 + 12
    assert model["a.weight"].data_ptr() == model["b.weight"].data_ptr()
    assert model["k"].tolist() == [0.0, 1.0, 2.0]


def test_edits_stay_in_the_module(client, archive):
    first, second = client.open(archive).jit(), client.open(archive).jit()
    with torch.no_grad():
        first.k.add_(10)
    assert first.k.tolist() == [10.0, 11.0, 12.0]
    assert second.k.tolist() == [0.0, 1.0, 2.0]


def test_module_outlives_its_model(client, archive):
    module = client.open(archive).jit()
    import gc

    gc.collect()
    assert module.k.tolist() == [0.0, 1.0, 2.0]


REBUILD_FROM_TYPE = (
    b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\nq\x00(K\x01K\x02K\x03K\x04tq\x01R."
)
CONSTANTS = {
    "empty": b"",
    "odd items": bytes.fromhex("80027d284b01752e"),
    "from type": REBUILD_FROM_TYPE,
}


@pytest.mark.parametrize("pickle", CONSTANTS.values(), ids=CONSTANTS.keys())
def test_crafted_constants(tmp_path, refused, archive, pickle):
    """C2"""
    path = tmp_path / "crafted.pt"
    rezip(archive, path, change=lambda n, old: pickle if n.endswith("/constants.pkl") else old)
    failure = refused(path, status=("bad_file", "unsupported", "loader_failed"))
    if failure.status == "loader_failed":
        assert "signal" in str(failure)


@pytest.mark.parametrize("record", ["data.pkl", "code/__torch__/test_torchscript.py", "data/1"])
def test_archive_with_a_spoiled_record(tmp_path, refused, archive, record):
    path = tmp_path / "spoiled.pt"
    rezip(archive, path, change=lambda n, old: old[: len(old) // 2] if n.endswith(record) else old)
    with zipfile.ZipFile(path) as records:
        assert any(name.endswith(record) for name in records.namelist()), records.namelist()
    refused(path, status=("bad_file", "unsupported", "loader_failed"))


def test_other_formats_have_no_module(tmp_path, client):
    torch.save({"w": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(NotImplementedError, match="TorchScript"):
        client.open(tmp_path / "a.pt").jit()


class _RunsCode(torch.nn.Module):
    """Rebuilding it would write the file that its path names."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.w = torch.nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        return self.w.sum() + x

    @torch.jit.export
    def __getstate__(self):
        return (self.path, self.w, self.training)

    @torch.jit.export
    def __setstate__(self, state: Tuple[str, torch.Tensor, bool]):
        self.path = state[0]
        torch.from_file(self.path, True, 8, dtype=torch.uint8).zero_()
        self.w = state[1]
        self.training = state[2]


def test_code_that_would_run_while_loading_is_refused(tmp_path, refused):
    victim, path = tmp_path / "victim", tmp_path / "runs.pt"
    torch.jit.save(torch.jit.script(_RunsCode(str(victim))), path)
    refused(path, "__setstate__", status=("unsupported",))
    assert not victim.exists()
