"""Which (type, class) pairs there are: every model type with the classes that users train."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import transformers as hf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

# (mapping, task): the task decides the labels of a class. The first mapping that names a class decides its task
MAPPINGS: tuple[tuple[str, str], ...] = (
    ("CAUSAL_LM", "tokens"),
    ("SEQ_TO_SEQ_CAUSAL_LM", "target"),
    ("SPEECH_SEQ_2_SEQ", "target"),
    ("MASKED_LM", "tokens"),
    ("IMAGE_TEXT_TO_TEXT", "tokens"),
    ("MULTIMODAL_LM", "tokens"),
    ("SEQUENCE_CLASSIFICATION", "class"),
    ("TOKEN_CLASSIFICATION", "token_classes"),
    ("QUESTION_ANSWERING", "span"),
    ("DOCUMENT_QUESTION_ANSWERING", "span"),
    ("TABLE_QUESTION_ANSWERING", "none"),
    ("MULTIPLE_CHOICE", "choice"),
    ("NEXT_SENTENCE_PREDICTION", "class"),
    ("PRETRAINING", "tokens"),
    ("IMAGE_CLASSIFICATION", "class"),
    ("VIDEO_CLASSIFICATION", "class"),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", "none"),
    ("MASKED_IMAGE_MODELING", "none"),
    ("CAUSAL_IMAGE_MODELING", "none"),
    ("SEMANTIC_SEGMENTATION", "pixels"),
    ("UNIVERSAL_SEGMENTATION", "none"),
    ("INSTANCE_SEGMENTATION", "none"),
    ("IMAGE_SEGMENTATION", "none"),
    ("OBJECT_DETECTION", "none"),
    ("ZERO_SHOT_OBJECT_DETECTION", "none"),
    ("DEPTH_ESTIMATION", "none"),
    ("NORMAL_ESTIMATION", "none"),
    ("POINTMAP_ESTIMATION", "none"),
    ("POSE_ESTIMATION", "none"),
    ("KEYPOINT_DETECTION", "none"),
    ("IMAGE_TO_IMAGE", "none"),
    ("IMAGE_MATTING", "none"),
    ("MASK_GENERATION", "none"),
    ("TEXT_RECOGNITION", "none"),
    ("TABLE_RECOGNITION", "none"),
    ("CTC", "transcript"),
    ("RNNT", "transcript"),
    ("TDT", "transcript"),
    ("AUDIO_CLASSIFICATION", "class"),
    ("AUDIO_FRAME_CLASSIFICATION", "none"),
    ("AUDIO_XVECTOR", "class"),
    ("TEXT_TO_SPECTROGRAM", "none"),
    ("TEXT_TO_WAVEFORM", "none"),
    ("VISUAL_QUESTION_ANSWERING", "none"),
    ("RETRIEVAL", "none"),
    ("TIME_SERIES_PREDICTION", "none"),
    ("TIME_SERIES_CLASSIFICATION", "class"),
    ("TIME_SERIES_REGRESSION", "none"),
    ("TEXT_ENCODING", "none"),
    ("BACKBONE", "none"),
)


@dataclass(frozen=True)
class Pair:
    """A model type, a class of it, and what its labels look like."""

    type: str
    model: str
    task: str

    @property
    def name(self) -> str:
        return f"{self.type}/{self.model}"


def catalogue() -> list[Pair]:
    """Every pair. If no other class of a type is known, the type's bare model is used."""
    found: dict[tuple[str, str], Pair] = {}
    for mapping, task in MAPPINGS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault((model_type, name), Pair(model_type, name, task))
    trained = {pair.type for pair in found.values()}
    for model_type, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        if model_type not in trained:
            name = names if isinstance(names, str) else names[0]
            found[model_type, name] = Pair(model_type, name, "none")
    order = {model_type: i for i, model_type in enumerate(CONFIG_MAPPING_NAMES)}
    return sorted(found.values(), key=lambda pair: (order.get(pair.type, len(order)), pair.model))


def types_without_a_class() -> list[str]:
    """Types that have a config but no listed class of their own. They are parts of other models."""
    return sorted(set(CONFIG_MAPPING_NAMES) - {pair.type for pair in catalogue()})


def model_class(pair: Pair) -> Any:
    """The class. A few are not among the library's public names: these are looked for in the type's own module."""
    if hasattr(hf, pair.model):
        return getattr(hf, pair.model)
    folder = pair.type.replace("-", "_")
    try:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        return getattr(module, pair.model)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"transformers has no class {pair.model}") from error
