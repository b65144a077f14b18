"""What `patch_all` patches: functions and methods by module and name, those of users too."""

from __future__ import annotations

import os
import re
import sys
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

# Where the function or the class is defined, in every version that has it.
LIBRARIES: Dict[str, Tuple[str, ...]] = {
    "torch": (
        "torch.serialization:load",
        "torch.jit._serialization:load",
    ),
    "safetensors": ("safetensors.torch:load_file",),
    "transformers": (
        "transformers.modeling_utils:PreTrainedModel.from_pretrained",
        "transformers.tokenization_utils_base:PreTrainedTokenizerBase.from_pretrained",
        "transformers.processing_utils:ProcessorMixin.from_pretrained",
        "transformers.feature_extraction_utils:FeatureExtractionMixin.from_pretrained",
        "transformers.image_processing_base:ImageProcessingMixin.from_pretrained",
        "transformers.video_processing_utils:BaseVideoProcessor.from_pretrained",
        "transformers.models.auto.auto_factory:_BaseAutoModelClass.from_pretrained",
        "transformers.models.auto.auto_factory:_BaseAutoBackboneClass.from_pretrained",
        "transformers.models.auto.tokenization_auto:AutoTokenizer.from_pretrained",
        "transformers.models.auto.processing_auto:AutoProcessor.from_pretrained",
        "transformers.models.auto.image_processing_auto:AutoImageProcessor.from_pretrained",
        "transformers.models.auto.feature_extraction_auto:AutoFeatureExtractor.from_pretrained",
        "transformers.models.auto.video_processing_auto:AutoVideoProcessor.from_pretrained",
        "transformers.pipelines:pipeline",
    ),
    "diffusers": (
        "diffusers.pipelines.pipeline_utils:DiffusionPipeline.from_pretrained",
        "diffusers.pipelines.auto_pipeline:AutoPipelineForText2Image.from_pretrained",
        "diffusers.pipelines.auto_pipeline:AutoPipelineForImage2Image.from_pretrained",
        "diffusers.pipelines.auto_pipeline:AutoPipelineForInpainting.from_pretrained",
        "diffusers.models.modeling_utils:ModelMixin.from_pretrained",
        "diffusers.models.auto_model:AutoModel.from_pretrained",
        "diffusers.schedulers.scheduling_utils:SchedulerMixin.from_pretrained",
        "diffusers.loaders.single_file:FromSingleFileMixin.from_single_file",
        "diffusers.loaders.single_file_model:FromOriginalModelMixin.from_single_file",
        "diffusers.loaders.single_file:FromOriginalVAEMixin.from_single_file",
        "diffusers.loaders.single_file:FromOriginalControlnetMixin.from_single_file",
        "diffusers.loaders.autoencoder:FromOriginalVAEMixin.from_single_file",
        "diffusers.loaders.controlnet:FromOriginalControlNetMixin.from_single_file",
    ),
    "torchvision": (
        "torchvision.models.vgg:vgg16",
        "torchvision.models.vgg:vgg19",
    ),
    "open_clip": ("open_clip.factory:create_model_and_transforms",),
    "peft": ("peft.auto:_BaseAutoPeftModel.from_pretrained",),
    # Its constructors load by transformers and torch, and are covered by those.
    "sentence_transformers": (),
}


class Point(NamedTuple):
    """A function to patch. `own`: a user named it, so its absence is worth a warning."""

    module: str
    path: Tuple[str, ...]
    own: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"


def parse(text: str, own: bool = True) -> Point:
    """A point from "package.module:Class.method", or with two colons. Raises ValueError."""
    match = re.fullmatch(r"([\w.]+)::?([\w.]+)", text.strip())
    if match is None or "" in (*match[1].split("."), *match[2].split(".")):
        raise ValueError(f"{text!r} is no patch point: write package.module:function or …:Class.method")
    return Point(match[1], tuple(match[2].split(".")), own)


def of_libraries(names: Tuple[str, ...]) -> List[Point]:
    """The points of some libraries, by default of all. Raises ValueError for a name nobody knows."""
    for name in names:
        if name not in LIBRARIES:
            raise ValueError(f"{name!r} is none of {', '.join(LIBRARIES)}; modelcache.patch takes others")
    chosen = names or tuple(LIBRARIES)
    return [parse(text, own=False) for name in chosen for text in LIBRARIES[name]]


def of_users(caller: Optional[str]) -> List[Point]:
    """The points in pyproject.toml and overmind.cfg of whoever calls. Raises ValueError."""
    folders = [os.getcwd()]
    if caller is not None and os.path.exists(caller):
        folders.append(os.path.dirname(os.path.abspath(caller)))
    texts: List[str] = []
    for path in dict.fromkeys(filter(None, map(_project, folders))):
        texts += _of_pyproject(path)
    for path in _configurations(folders[-1]):
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
        texts += [line for line in lines if line]
    return [parse(text) for text in dict.fromkeys(texts)]


def _above(folder: str) -> Iterator[str]:
    while True:
        yield folder
        parent = os.path.dirname(folder)
        if parent == folder:
            return
        folder = parent


def _project(folder: str) -> Optional[str]:
    """The nearest pyproject.toml above a folder."""
    for above in _above(folder):
        path = os.path.join(above, "pyproject.toml")
        if os.path.isfile(path):
            return path
    return None


def _configurations(folder: str) -> Iterator[str]:
    """overmind.cfg in a folder, and in those of the packages around it."""
    for above in _above(folder):
        path = os.path.join(above, "overmind.cfg")
        if os.path.isfile(path):
            yield path
        if not os.path.exists(os.path.join(above, "__init__.py")):
            return


def _of_pyproject(path: str) -> List[str]:
    with open(path, "rb") as file:
        data = file.read()
    if b"tool.modelcache" not in data:
        return []
    table = _toml(data.decode("utf-8", "replace")).get("tool", {}).get("modelcache", {})
    points = table.get("patch", [])
    if not isinstance(points, list) or not all(isinstance(point, str) for point in points):
        raise ValueError(f"{path}: patch of [tool.modelcache] is a list of texts")
    return points


def _toml(text: str) -> Dict[str, Dict[str, Dict[str, object]]]:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    section = re.search(r"^\[tool\.modelcache\]\s*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = re.sub(r"^\s*#.*$", "", section[1] if section else "", flags=re.MULTILINE)
    found = re.search(r"^\s*patch\s*=\s*\[(.*?)\]", lines, re.MULTILINE | re.DOTALL)
    points = re.findall(r"\"([^\"]*)\"|'([^']*)'", found[1] if found else "")
    return {"tool": {"modelcache": {"patch": [one or other for one, other in points]}}}
