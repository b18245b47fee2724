"""The batch that a class of transformers is trained on, as its `forward` and its config describe it.

    text                        random words; placeholders where a picture or a sound goes in, as many as the model makes of it
    pictures, films, sound      see `hub_media`
    what else it must have      one rule for each name (`hub_named`)
    labels                      where the class computes a loss from them
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import UserError
from foretell.trace.hub import documented_inputs as told
from foretell.trace.hub import media
from foretell.trace.hub.named_inputs import ALWAYS, NAMED, SEQ
from foretell.trace.hub.widen import BatchTrial

if TYPE_CHECKING:
    from torch import Tensor

    from foretell.trace.load.model import Source

LABELS, BESIDE = 64, 64
"""Letters of a transcript, and words beside a picture, where nothing says otherwise."""
_PICTURES = ("pixel_values", "pixel_values_images", "image", "images")
_COMPANIONS = {
    "image_grid_thw", "grid_thw", "image_grid_hws", "grid_hws", "spatial_shapes", "image_sizes", "pixel_attention_mask", "aspect_ratio_ids",
    "image_position_ids", "pixel_position_ids",
}  # fmt: skip
"""Inputs that say how a picture is laid out."""
_FILMS = ("pixel_values_videos",)
_SOUNDS = ("input_features", "input_values", "audio_values")
_KINDS: tuple[tuple[tuple[str, ...], str, Any, tuple[str, ...], int], ...] = (
    (_PICTURES, "get_image_features", media.picture_layouts, ("image_token_id", "image_token_index", "img_token_id", "vision_token_id"), 1),
    (_FILMS, "get_video_features", media.film_layouts, ("video_token_id", "video_token_index"), 2),
    (_SOUNDS, "get_audio_features", media.sound_layouts, ("audio_token_id", "audio_token_index", "speech_token_id"), 3),
)
"""Inputs, what makes features of them, how they are laid out, the token that stands for them, and its number in `mm_token_type_ids`."""
_PLAIN = (
    "ForImageClassification", "ForVideoClassification", "ForSemanticSegmentation", "ForCTC", "ForAudioClassification",
    "WhisperForConditionalGeneration",
)  # fmt: skip
"""Classes whose input is laid out as the config tells: they are not asked."""
_COMMON = {
    "input_ids", "attention_mask", "position_ids", "token_type_ids", "past_key_values", "inputs_embeds", "labels", "next_sentence_label", "use_cache",
    "cache_position", "logits_to_keep", "head_mask", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "kwargs",
    "cache_params", "args",
}  # fmt: skip
"""Inputs of classes that read text."""
_WITHOUT_LABELS = (
    "Detection", "UniversalSegmentation", "InstanceSegmentation", "ForSegmentation", "Depth", "Keypoint", "Pose", "Matting", "ForImageToImage",
    "SuperResolution", "ToSpeech", "Spectrogram", "Waveform", "ForCTC", "Recognition", "ForRNNT", "ForTDT", "Retrieval", "Pointmap",
)  # fmt: skip
"""Tasks whose labels are no whole numbers of one size, or that are matched to the outputs by data: no loss of their own here."""


def batch_of(source: Source, model: Any, notes: list[str]) -> dict[str, Any]:
    """What the class takes, at the sizes of its config; labels if it computes a loss from them."""
    maker = Maker(source, model, notes)
    batch = maker.made()
    if not maker.is_unusual():
        return batch
    found = maker.asked.widened(batch)
    changed = [name for name, value in found.items() if hasattr(value, "shape") and (name not in batch or value.shape != batch[name].shape)]
    if changed:
        shapes = ", ".join(f"{name} of {' × '.join(map(str, found[name].shape))}" for name in changed)
        notes.append(f"{shapes}: inputs of {type(model).__name__} in the first shapes that it takes, which its users may not give it")
    return found


class Maker:
    def __init__(self, source: Source, model: Any, notes: list[str]) -> None:
        self.source, self.model, self.notes, self.n = source, model, notes, source.micro_batch
        self.config = model.config
        self.takes = inspect.signature(model.forward).parameters
        self.text = self._text_config()
        main = model.main_input_name
        self.main = main if isinstance(main, str) else main[0]
        self.batch: dict[str, Any] = {}

    def _text_config(self) -> Any:
        try:
            return self.config.get_text_config()
        except ValueError:  # several texts: that which is written
            return self.config.get_text_config(decoder=True)

    @property
    def vocabulary(self) -> int:
        for config in (self.text, self.config, getattr(self.config, "decoder", None), getattr(self.config, "generator", None)):
            size = media.first(config, "vocab_size", "text_vocab_size", "vocabulary_size") if config is not None else None
            if isinstance(size, int):
                return size
        table = next((module for path, module in self.model.named_modules() if type(module).__name__ == "Embedding" and "pos" not in path), None)
        return int(table.num_embeddings) if table is not None else 256

    def required(self) -> list[str]:
        plain = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return [name for name, one in self.takes.items() if one.default is inspect.Parameter.empty and one.kind not in plain]

    def made(self) -> dict[str, Any]:
        standing, others = self._media()
        if "input_ids" in self.takes and (self.main in ("input_ids", "state", *_PICTURES, *_FILMS) or standing or self._must_write()):
            self.batch["input_ids"] = self._words(standing)
            self._beside_words(standing)
        own = [self.main] if not self.batch and not others else []
        for name in [*self.required(), *own, *(name for name in ALWAYS if name in self.takes)]:
            if name not in self.batch and name in NAMED and name not in (one for one, _ in others):
                self.batch[name] = NAMED[name](self)
        writes = "decoder_input_ids" in self.takes
        if writes:  # without something to write such a model does not run, whatever it is given to read
            self._labels()
        for name, layouts in others:
            self.batch.update(self._laid_out(name, layouts))
        for name in self.required():
            if name not in self.batch and told.may_be_given(name) and self.takes.keys() != {"input"}:
                value = self.asked.made(name, self.batch)
                self.batch.update({} if value is None else {name: value})
        missing = [name for name in self.required() if name not in self.batch]
        if self.takes.keys() == {"input"} and not self.batch:
            name = type(self.model).__name__
            raise UserError(f"{name} of transformers has no forward of its own", "it is used by other models: ask for one of those")
        if missing or not self.batch.keys() - {"labels", "decoder_input_ids"}:
            what = "', '".join(missing or [self.main])
            raise UserError(
                f"{self.source.model} takes '{what}', for which foretell can make no batch", "write file.py:function that returns (model, batch)"
            )
        if not writes:
            self._labels()
        return self.batch

    @functools.cached_property
    def asked(self) -> BatchTrial:
        return BatchTrial(self.source, self.model, self.main, self.length(), self.vocabulary)

    def is_unusual(self) -> bool:
        """Whether a class takes what other classes of its kind do not: then it is asked whether it takes this batch."""
        reads = self.batch.keys() == {"input_ids", "labels"} and self.takes.keys() <= _COMMON
        return not reads and not self._is_plain()

    def _must_write(self) -> bool:
        return self.main not in self.takes or "input_ids" in self.required()

    # ------------------------------------------------------------------ pictures, films, sound

    def _media(self) -> tuple[list[tuple[int, int, int]], list[tuple[str, Any]]]:
        """Those that stand in the text are put into the batch: (token, how many for each sample, kind); the others with their layouts."""
        standing: list[tuple[int, int, int]] = []
        others: list[tuple[str, Any]] = []
        for names, features, layouts, tokens, kind in _KINDS:
            name = next((one for one in names if one in self.takes), None)
            if "input_values" in names and "input_values" in self.takes and hasattr(getattr(self.config, "encoder", None), "feat_extract_norm"):
                name = "input_values"
            if name is None or (kind == 2 and self.main != name and any(one in self.batch for one in _PICTURES)):
                continue
            token = next((value for one in tokens if isinstance(value := self._setting(one), int)), None)
            ask = media.asked(self.model, features)
            if ask is None or token is None or self._is_written(name):
                others.append((name, layouts))
                continue
            beside = {one: NAMED[one](self) for one in ("qformer_input_ids",) if one in self.takes}
            found = media.first_that_runs(ask, ({**beside, **layout} for layout in layouts(self.source, self.model, name, self.takes)))
            if found is None:
                others.append((name, layouts))
            else:
                self.batch.update(found[0])
                standing.append((token, media.count(found[1]) // self.n, kind))
        return [one for one in standing if one[1]], others

    def _is_written(self, name: str) -> bool:
        """Whether the text is what the model writes of it, and not what it goes into."""
        return name == self.main and "input_ids" not in self.takes

    def _setting(self, name: str) -> Any:
        return media.first(self.config, name) if media.first(self.config, name) is not None else media.first(self.text, name)

    def _laid_out(self, name: str, layouts: Any) -> dict[str, Any]:
        """As the config tells; where it leaves that open, the first that the model takes beside the rest of the batch."""
        usual = self._usual(name)
        if usual is not None and self._is_plain():
            return {name: usual}
        possible = itertools.chain([{name: usual}] if usual is not None else [], layouts(self.source, self.model, name, self.takes))
        found = media.first_that_runs(self.model.forward, ({**self.batch, **layout} for layout in possible))
        if found is not None:
            return {key: value for key, value in found[0].items() if key not in self.batch}
        if name != self.main and name not in self.required():
            return {}
        return {name: usual} if usual is not None else dict(next(iter(layouts(self.source, self.model, name, self.takes))))

    def picture(self) -> tuple[int, ...]:
        return _picture(self.n, self.config, self.source, self.model)

    def _is_plain(self) -> bool:
        return type(self.model).__name__.endswith(_PLAIN)

    def _usual(self, name: str) -> Tensor | None:
        """What most families take."""
        import torch

        config, n, source = self.config, self.n, self.source
        if name in _PICTURES and not _COMPANIONS & set(self.takes):
            return torch.randn(_picture(n, config, source, self.model))
        if name == "input_values" and (hasattr(config, "feat_extract_norm") or getattr(config, "max_length", None)):
            return torch.randn(_sound(n, config, source))
        if name == "input_features" and getattr(config, "num_mel_bins", None) and getattr(config, "max_source_positions", None):
            return torch.randn(_sound(n, config, source))
        return None

    # ------------------------------------------------------------------ words

    def length(self, least: int = 0) -> int:
        """Tokens in a text: as asked, else what the model has positions for, up to 1,024."""
        from torch import nn

        if self.source.seq is not None:
            return max(self.source.seq, least + 1)
        shape = getattr(self.config, "axial_pos_shape", None)
        if shape and getattr(self.config, "axial_pos_embds", False):
            return int(math.prod(shape))  # positions are those of a grid, all of it
        limits = [max(SEQ, least + BESIDE), media.first(self.text, "max_position_embeddings", "n_positions", "max_seq_len") or SEQ]
        limits.append(media.first(self.config, "max_text_len") or SEQ)
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and "position" in path.rpartition(".")[2] and module.padding_idx is not None:
                limits.append(module.num_embeddings - module.padding_idx - 1)  # positions are counted from the padding's
        found = int(min(limit for limit in limits if isinstance(limit, int) and limit > 0))
        return found if found > least else least + BESIDE

    def _words(self, standing: list[tuple[int, int, int]]) -> Tensor:
        import torch

        least = sum(count + 1 for _, count, _ in standing)
        words, special = self.vocabulary, {token for token, _, _ in standing}
        if not standing:
            return torch.randint(0, words, (self.n, self.length(), *self._books()))
        ids = torch.randint(0, words, (self.n, self.length(least)))
        plain = next(one for one in range(words) if one not in special and one > 2)
        for token in self._special_tokens():
            ids = torch.where(ids == token, torch.full_like(ids, plain), ids)
        at = 1
        for token, count, kind in standing:
            before = self._setting("vision_start_token_id") if kind < 3 else self._setting("audio_start_token_id")
            if isinstance(before, int):
                ids[:, at - 1] = before
            ids[:, at : at + count] = token
            at += count + 1
        return ids

    def _books(self) -> list[int]:
        """Sound in the text: a token of every codebook at every place, beside the word where the class reads both."""
        name, books = type(self.model).__name__, media.first(self.config, "num_codebooks")
        return [books + (not name.startswith("Csm"))] if books and name.startswith(("Csm", "KyutaiSpeech")) else []

    def _special_tokens(self) -> set[int]:
        found = {value for config in (self.config, self.text) for name, value in config.to_dict().items()
                 if name.endswith(("token_id", "token_index")) and isinstance(value, int) and not isinstance(value, bool)}  # fmt: skip
        return {one for one in found if one >= 0}

    def _beside_words(self, standing: list[tuple[int, int, int]]) -> None:
        import torch

        ids = self.batch["input_ids"]
        for name in ("mm_token_type_ids", "token_type_ids") if standing else ():
            if name in self.takes:
                kinds = torch.zeros_like(ids)
                for token, _, kind in standing:
                    kinds = torch.where(ids == token, torch.full_like(ids, kind), kinds)
                self.batch[name] = kinds

    # ------------------------------------------------------------------ labels

    def _labels(self) -> None:
        import torch

        name = type(self.model).__name__
        if "return_loss" in self.takes:
            self.batch["return_loss"] = True
        elif "labels" in self.takes and not any(task in name for task in _WITHOUT_LABELS):
            self.batch["labels"] = _labels(self)
            if "next_sentence_label" in self.takes:
                self.batch["next_sentence_label"] = torch.randint(0, 2, (self.n,))
        elif "decoder_input_ids" in self.takes:
            self.batch["decoder_input_ids"] = torch.randint(0, self.vocabulary, (self.n, self.source.seq or LABELS))


def _picture(n: int, config: Any, source: Source, model: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", None) or config
    high, wide = media.sides(source, vision)
    channels = getattr(vision, "num_channels", None) or getattr(getattr(config, "backbone_config", None), "num_channels", None) or 3
    frames = (getattr(vision, "num_frames", None) or media.FRAMES,) if "Video" in type(model).__name__ else ()
    return (n, *frames, channels if isinstance(channels, int) else 3, high, wide)


def _sound(n: int, config: Any, source: Source) -> tuple[int, ...]:
    """Spectrograms as each family lays them out; raw samples when the config speaks of none."""
    bins = getattr(config, "num_mel_bins", None)
    if bins and getattr(config, "max_source_positions", None) and not hasattr(config, "input_feat_per_channel"):
        return (n, bins, 2 * config.max_source_positions)  # its first convolutions halve the frames
    bins = bins or media.first(config, "input_feat_per_channel", "feature_projection_input_dim")
    if bins:
        return (n, source.seq or getattr(config, "max_length", None) or SEQ, bins)
    return (n, source.seq or media.SAMPLES)


def _labels(maker: Maker) -> Tensor:
    """Integer targets in the shape the task has: one per token, per picture, per pixel, or a transcript."""
    import torch

    config, name, n, batch = maker.config, type(maker.model).__name__, maker.n, maker.batch
    if "SemanticSegmentation" in name:
        return torch.randint(0, config.num_labels, (n, *batch["pixel_values"].shape[-2:]))
    if name.endswith("Classification") and "Token" not in name:
        return torch.randint(0, config.num_labels, (n,))
    text = config.get_text_config(decoder=True)
    words = text.vocab_size if isinstance(getattr(text, "vocab_size", None), int) else maker.vocabulary
    if "input_ids" in batch:
        return torch.randint(0, words, tuple(batch["input_ids"].shape[: 3 if name.startswith("Csm") else 2]))
    limit = media.first(config, "max_target_positions") or media.first(text, "max_position_embeddings") or LABELS
    return torch.randint(0, words, (n, maker.source.seq or min(limit, SEQ)))


def notes_on(model: Any, batch: Mapping[str, Any]) -> list[str]:
    """What a reader should know of the batch."""
    takes, name = inspect.signature(model.forward).parameters, type(model).__name__
    told = []
    if "labels" not in batch and "return_loss" not in batch:
        told.append(f"{name} has no loss of its own: the mean of its first output stands in for it")
    if "ForCTC" in name:
        told.append("CTC loss needs real lengths: the mean of the logits stands in for it")
    if any(one in takes for one in _PICTURES) and not any(one in batch for one in (*_PICTURES, *_FILMS)):
        told.append(f"{name} is given text only: its image part is in memory but does not run")
    if "input_ids" in batch and any(one in takes for one in _SOUNDS) and not any(one in batch for one in _SOUNDS):
        told.append(f"{name} is given no sound: its audio part is in memory but does not run")
    if "input_ids" in batch and any(one in batch for one in (*_PICTURES, *_FILMS, *_SOUNDS)):
        given = next(one for one in (*_PICTURES, *_FILMS, *_SOUNDS) if one in batch)
        shape = " × ".join(str(size) for size in batch[given].shape)
        told.append(f"{name} is given {given} of {shape} beside {batch['input_ids'].shape[1]} tokens; --image and --seq say otherwise")
    return told
