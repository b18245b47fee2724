"""Which config and which class of transformers stand for a model type.

    hf:TYPE            the type's defaults, and a usual pair of parts where it has none of its own
    hf:config.json     what the file says
    class              what the config was trained as, else the first training class there is for it, else any class of its module
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from foretell.errors import UserError

_TEXT = ("MaskedLM", "CausalLM", "ImageTextToText", "MultimodalLM")
_SEQ2SEQ = ("Seq2SeqLM", "SpeechSeq2Seq", "ImageTextToText")
_MIXED = ("ImageTextToText", "MultimodalLM", "Seq2SeqLM", "SpeechSeq2Seq")
"""Of configs with parts for pictures or sound: their causal class, where they have one, is only the text part."""
_OTHER = ("ZeroShotImageClassification", "ImageClassification", "VideoClassification", "SemanticSegmentation", "CTC",
          "AudioClassification", "SequenceClassification")  # fmt: skip
_HEADS = (
    "ObjectDetection", "ZeroShotObjectDetection", "UniversalSegmentation", "InstanceSegmentation", "DepthEstimation", "PoseEstimation",
    "KeypointDetection", "KeypointMatching", "ImageMatting", "ImageToImage", "TextRecognition", "TableRecognition", "TextToSpectrogram",
    "TextToWaveform", "RNNT", "TDT", "TimeSeriesPrediction", "MaskGeneration", "Retrieval",
)  # fmt: skip
_SECOND = ("PreTraining", "TextEncoding", "Backbone", "AudioTokenization")
MEDIA = ("vision_config", "audio_config", "image_config", "perception_config", "audio_encoder_config", "vision_encoder_config", "encoder_config")
_WRITES = {"is_decoder": True, "add_cross_attention": True}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "encoder-decoder": {"encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert", **_WRITES}},
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2", **_WRITES}},
    "nougat": {"encoder": {"model_type": "donut-swin"}, "decoder": {"model_type": "mbart", **_WRITES}},
    "speech-encoder-decoder": {"encoder": {"model_type": "wav2vec2"}, "decoder": {"model_type": "bert", **_WRITES}},
    "granite4_vision": {"text_config": {"model_type": "granite"}},
    "vision-text-dual-encoder": {"vision_config": {"model_type": "vit"}, "text_config": {"model_type": "bert"}},
    "rag": {"question_encoder": {"model_type": "dpr"}, "generator": {"model_type": "bart"}},
    "musicgen": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {"model_type": "musicgen_decoder"}},
    "musicgen_melody": {
        "text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}, "decoder": {"model_type": "musicgen_melody_decoder"},
    },
}  # fmt: skip
"""Parts of types that are made of two other types, as their first checkpoints had them."""
_SERIES = ("autoformer", "informer", "time_series_transformer")
_NEEDED: dict[str, dict[str, Any]] = {
    **{kind: {"prediction_length": 24, "context_length": 48, "num_time_features": 2} for kind in _SERIES},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6},
    "emu3": {"pad_token_id": 151643},
    "step3p5": {"sliding_window": 512},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
    "qwen3_omni_moe_talker": {"text_config": {"shared_expert_intermediate_size": 768}},
    "qwen3_omni_moe": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 768}}},
}
"""Settings without which a type cannot be run and which it has no default for."""


def plain(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """What is given, with what the type has no default for."""
    return {**_NEEDED.get(kind, {}), **{key: dict(part) for key, part in PARTS.get(kind, {}).items()}, **given}


def mended(config: Any, given: dict[str, Any]) -> Any:
    """Defaults that do not fit each other: features of pictures are as wide as the text that they go into; see also `_fit`."""
    text = getattr(config, "text_config", None)
    for name in MEDIA:
        part, said = getattr(config, name, None), given.get(name) or {}
        if text is None or part is None:
            continue
        if hasattr(part, "out_hidden_size") and "out_hidden_size" not in said:
            part.out_hidden_size = text.hidden_size
        elif hasattr(part, "embed_dim") and hasattr(part, "hidden_size") and "hidden_size" not in said:
            part.hidden_size = text.hidden_size  # a stack with a width of its own: this is that of its features
    for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
        if text is not None and has_media(config) and hasattr(config, name) and getattr(config, name) is None:
            setattr(config, name, text.vocab_size - (1 if name.startswith("image") else 2))
    for part in (config, *_parts(config)):
        _fit(part)
    return config


def _fit(part: Any) -> None:
    """Patches that are shuffled into wide ones, as wide as what reads them."""
    ratio, wide = getattr(part, "pixel_shuffle_ratio", None), getattr(part, "intermediate_size", None)
    if isinstance(ratio, float) and isinstance(wide, int) and hasattr(part, "projector_input_dim") and part.hidden_size != int(wide * ratio**2):
        part.hidden_size = int(wide * ratio**2)


def rotated(config: Any, model: Any) -> bool:
    """Whether a part of each head should have been rotated, and the config says so now: sections of time, rows and columns are fewer."""
    for module in model.modules():
        sections, turned = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if isinstance(sections, (list, tuple)) and turned is not None and 0 < sum(sections) < turned.numel():
            of = next((part for part in (config, *_parts(config)) if part is getattr(module, "config", None)), None)
            if of is not None and isinstance(getattr(of, "rope_parameters", None), dict) and "partial_rotary_factor" not in of.rope_parameters:
                of.rope_parameters["partial_rotary_factor"] = sum(sections) / turned.numel()
                return True
    return False


def decoded(value: Any) -> Any:
    """Numbers that JSON has no word for, as transformers writes them."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: decoded(one) for key, one in value.items()}
    return [decoded(one) for one in value] if isinstance(value, list) else value


def has_media(config: Any) -> bool:
    return any(getattr(config, part, None) is not None for part in MEDIA)


def model_class(config: Any) -> Any:
    """What the config says it was trained as, else the first training class there is for it."""
    for found in model_classes(config):
        return found
    raise UserError(f"transformers has no model for {type(config).__name__}", "choose a model type that has one")


def built(config: Any, build: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The first class that builds from a type's defaults, and what is built; the error of the first where none does.

    A type may have no default for the words of one task (`vocab_size`) and be fine for another. Where none builds, heads without a width
    get that which others compute: the width of the stack, shared evenly.
    """
    classes, refusal = list(model_classes(config)) or [model_class(config)], None
    for mend in (lambda: True, lambda: _give_heads_width(config)):
        for found in classes if mend() else ():
            try:
                return found, build(found)
            except (RuntimeError, ImportError):  # of the mode it is built in, and of a package that is not there: another class is no answer
                raise
            except Exception as error:
                refusal = refusal or error
    assert refusal is not None
    raise refusal


def _give_heads_width(config: Any) -> bool:
    without = [part for part in (config, *_parts(config)) if vars(part).get("head_dim", 0) is None]
    for part in without:
        part.head_dim = part.hidden_size // part.num_attention_heads
    return bool(without)


def _parts(config: Any) -> list[Any]:
    return [part for part in vars(config).values() if hasattr(part, "to_dict")]


def model_classes(config: Any) -> Iterator[Any]:
    """What may stand for a config, the likeliest first.

    Encoder-decoders and masked models come before causal ones: most have a causal class too, which is only their
    decoder, or their encoder in disguise.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            yield found
            return
    order: tuple[str, ...] = (*_SEQ2SEQ, *_TEXT, *_OTHER) if getattr(config, "is_encoder_decoder", False) else (*_TEXT, *_OTHER)
    if getattr(config, "is_decoder", False):
        order = ("CausalLM", *order)
    if has_media(config):
        order = (*_MIXED, *order)
    known = False
    for auto in [*(f"AutoModelFor{task}" for task in (*order, *_HEADS)), "AutoModel", *(f"AutoModelFor{task}" for task in _SECOND)]:
        mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
        if type(config) in mapping:
            try:
                found = mapping[type(config)]
            except ValueError:  # a class of that name is not there
                continue
            known = True
            yield found[0] if isinstance(found, tuple) else found
    if not known:
        yield from _of_module(config)


def _is_built_from(cls: Any, kind: type) -> bool:
    """By its own word, or by the annotation of its constructor: parts inherit the word of the whole."""
    said = inspect.signature(cls.__init__).parameters.get("config")
    named = said is not None and kind.__name__ in re.findall(r"\w+", str(said.annotation))
    return named or getattr(cls, "config_class", None) is kind


def _of_module(config: Any) -> Iterator[Any]:
    """Classes beside the config that are built from it, those with a task first: parts of larger models have no other name."""
    from transformers import PreTrainedModel

    home = type(config).__module__.replace("configuration_", "modeling_")
    try:
        module = importlib.import_module(home)
    except ImportError:
        return
    own = [
        one
        for name, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, PreTrainedModel) and one.__module__ == home
        and not name.endswith("PreTrainedModel") and _is_built_from(one, type(config))
    ]  # fmt: skip
    yield from sorted(own, key=lambda one: ("For" not in one.__name__, not one.__name__.endswith("Model")))
