"""The models that the demo and the benchmarks load, made once and kept under .dev/models."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".dev" / "models"

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 2048, 5632, 12, 32000
SHARDS = 4


def llama_shapes():
    """Names and shapes of a Llama-shaped checkpoint: 748 M parameters."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            yield f"{prefix}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{prefix}input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _make_llama(folder):
    generator = torch.Generator().manual_seed(20240607)
    tensors = {
        name: torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)
        for name, shape in llama_shapes()
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards, filled = [{}], 0
    for name, tensor in tensors.items():
        if filled > total * len(shards) / SHARDS:
            shards.append({})
        shards[-1][name] = tensor
        filled += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _thousand():
    """A thousand tensors as small layers have them: 64 x 64 float32, each with a storage of its own."""
    generator = torch.Generator().manual_seed(7)
    return {f"layer.{i // 10}.part.{i % 10}.weight": torch.randn(64, 64, generator=generator)
            for i in range(1000)}


def _make_thousand(folder):
    tensors = _thousand()
    save_file(tensors, folder / "model.safetensors")
    torch.save(tensors, folder / "model.pt")


def _cached(name, make):
    folder = FOLDER / name
    if not folder.exists():
        part = FOLDER / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        part.rename(folder)  # a run that was cut short leaves nothing that looks whole
    return folder


def llama():
    """Folder with index and shards, about 1.5 GB in bfloat16, the same bytes every time."""
    return _cached("llama-1.5g", _make_llama)


def thousand():
    """Folder with the same thousand tensors as model.safetensors and as model.pt, 16 MB each."""
    return _cached("thousand", _make_thousand)


def size_bytes(folder):
    """Bytes of the weight files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def warm_page_cache(folder, *, from_disk=False):
    """Reads the weight files once, so that what follows is not about the disk.

    With `from_disk` the pages that are there are dropped first: the page cache of a file that was
    just written lies in larger folios, and maps faster, than that of a file read from disk.
    """
    for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
        with open(path, "rb", buffering=0) as file:
            if from_disk:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = bytearray(8 << 20)
            while file.readinto(buffer):
                pass
