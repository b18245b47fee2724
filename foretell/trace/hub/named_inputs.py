"""One rule for each input of transformers that is neither text, picture nor sound.

    NAMED     name -> how it is made, from the config and from what the batch has already
    ALWAYS    those that are given although a class could do without
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from foretell.trace.hub import media

if TYPE_CHECKING:
    from torch import Tensor

    from foretell.trace.hub.batch import Maker

SEQ = 1024
"""Tokens of a text, where nothing says otherwise."""


def _boxes(maker: Maker) -> Tensor:
    import torch

    shape = (*maker.batch["input_ids"].shape, 4)
    return torch.tensor([100, 100, 200, 200]).expand(shape).contiguous()


def _past(maker: Maker) -> int:
    """Steps of a series that a model looks back on."""
    config = maker.config
    lags = getattr(config, "lags_sequence", None) or [0]
    return int((media.first(config, "context_length") or 512) + max(lags))


def _series(steps: Callable[[Maker], int], width: Callable[[Any], int | None]) -> Callable[[Maker], Tensor]:
    def make(maker: Maker) -> Tensor:
        import torch

        wide = width(maker.config)
        return torch.rand((maker.n, steps(maker), *([wide] if wide else [])))

    return make


def _values_wide(config: Any) -> int | None:
    wide = media.first(config, "num_input_channels", "input_size")
    return wide if isinstance(wide, int) and (wide > 1 or hasattr(config, "num_input_channels")) else None


def _time_wide(config: Any) -> int | None:
    return getattr(config, "num_time_features", 0) + (0 if getattr(config, "num_time_features", 0) else 1)


def _future(maker: Maker) -> int:
    return int(media.first(maker.config, "prediction_length", "horizon_length") or 24)


def _float(*size: str | int) -> Callable[[Maker], Tensor]:
    """Numbers of a shape: sizes by the names of settings, or as they are."""

    def make(maker: Maker) -> Tensor:
        import torch

        return torch.randn((maker.n, *(one if isinstance(one, int) else int(_size(maker, one)) for one in size)))

    return make


def _size(maker: Maker, names: str) -> int:
    found = media.first(maker.config, *names.split("|"))
    return int(found) if isinstance(found, int) else 64


def _whole(length: int, names: str = "") -> Callable[[Maker], Tensor]:
    def make(maker: Maker) -> Tensor:
        import torch

        return torch.randint(0, maker.vocabulary, (maker.n, _size(maker, names) if names else length))

    return make


def _like_picture(maker: Maker) -> Tensor:
    import torch

    given = maker.batch.get("pixel_values")
    return torch.randn_like(given) if given is not None else torch.randn(maker.picture())


def _patches(maker: Maker) -> Tensor:
    """Of a vision part by itself: patches in a row, with their grid."""
    name = "hidden_states" if "hidden_states" in maker.takes else "pixel_values"
    if "grid_thw" in maker.takes:
        layouts = media.picture_layouts(maker.source, maker.model, name, maker.takes)
        found = media.first_that_runs(maker.model.forward, layouts)
        if found is not None:
            maker.batch.update(found[0])
            made: Tensor = found[0][name]
            return made
    high, wide = media.sides(maker.source, maker.config)
    heard = [(maker.n, SEQ, one) for one in media.heard(maker.model)]
    shapes = [(maker.n, SEQ, _size(maker, "hidden_size|d_model|hidden_dim")), *heard, (maker.n, 3, high, wide), (maker.n, 1, media.SAMPLES)]
    found = media.first_that_runs(maker.model.forward, ({**maker.batch, name: _drawn(shape)} for shape in shapes))
    return found[0][name] if found is not None else _drawn(shapes[0])


def _drawn(shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.randn(shape)


def _flattened(maker: Maker) -> Tensor:
    import torch

    vision = media.part_of(maker.config, "vision")
    wide = 2 + 3 * (media.first(vision, "patch_size") or 16) ** 2
    return torch.ones(maker.n, min(2048, media.first(vision, "seq_len") or 2048), wide)


def _own_inputs(maker: Maker) -> Tensor:
    """Words where the class reads words, features otherwise."""
    return maker._words([]) if type(maker.model).__name__.endswith(_WORDY) else _float(SEQ, "d_model")(maker)


def _ones(other: str) -> Callable[[Maker], Tensor]:
    def make(maker: Maker) -> Tensor:
        import torch

        shape = maker.batch[other].shape if other in maker.batch else NAMED[other](maker).shape
        return torch.ones(shape)

    return make


def _speech(maker: Maker) -> Any:
    return media.first(maker.config, "model_config") or maker.config


def _places(maker: Maker) -> Tensor:
    """Where in a text the features of a picture go."""
    import torch

    mask = torch.zeros_like(maker.batch["input_ids"])
    mask[:, 1 : 1 + int(media.first(maker.config, "latent_query_num") or 64)] = 1
    return mask


def _all_of(other: str) -> Callable[[Maker], Tensor]:
    """A mask over the rows of another input, or of the words, that hides nothing."""

    def make(maker: Maker) -> Tensor:
        import torch

        given = maker.batch.get(other, maker.batch.get("input_ids"))
        if given is None:
            given = next(iter(maker.batch.values()))
        return torch.ones(given.shape[:2], dtype=torch.int64)

    return make


_WORDY = ("MaskedLM", "SequenceClassification")
"""Classes that read words, whatever they call them."""
NAMED: dict[str, Callable[[Maker], Any]] = {
    "bbox": _boxes,
    "image_embeds_position_mask": _places,
    "duration_labels": _all_of("input_ids"),
    "pitch_labels": lambda maker: _ones("input_ids")(maker)[..., None],
    "energy_labels": lambda maker: _ones("input_ids")(maker)[..., None],
    "spectrogram_labels": lambda maker: _ones("input_ids")(maker)[..., None].repeat(1, 1, media.first(_speech(maker), "num_mel_bins") or 80),
    "image_attention_mask": lambda maker: _ones("input_ids")(maker)[..., None],
    "context": _float(SEQ, "hidden_size"),
    "attention_mask": _all_of("context"),
    "audio_mel": _float(SEQ, "input_feat_size"),
    "audio_mel_mask": lambda maker: _ones("audio_mel")(maker)[..., 0] < 0,
    "past_values": _series(_past, _values_wide),
    "past_time_features": _series(_past, _time_wide),
    "past_observed_mask": _ones("past_values"),
    "future_values": _series(_future, _values_wide),
    "future_time_features": _series(_future, _time_wide),
    "past_values_padding": lambda maker: _ones("past_values")(maker) * 0,
    "freq": lambda maker: _whole(1)(maker) * 0,
    "visual_feats": _float(36, "visual_feat_dim"),
    "visual_pos": _float(36, "visual_pos_dim"),
    "visual_embeds": _float(36, "visual_embedding_dim"),
    "qformer_input_ids": _whole(32),
    "prompt_pixel_values": _like_picture,
    "prompt_masks": _like_picture,
    "task_inputs": _whole(77, "task_seq_len"),
    "state": _float("max_state_dim"),
    "actions": _float("chunk_size", "max_action_dim"),
    "hidden_states": _patches,
    "spectrogram": _float(256, "model_in_dim|num_mel_bins"),
    "flattened_patches": _flattened,
    "classes_input_ids": lambda maker: _whole(77)(maker),
    "classes_attention_mask": lambda maker: _whole(77)(maker) * 0 + 1,
    "tasks_input_ids": lambda maker: _whole(77)(maker),
    "tasks_attention_mask": lambda maker: _whole(77)(maker) * 0 + 1,
    "classes_structure": lambda maker: _whole(1)(maker)[:, 0] * 0 + 1,
    "encoder_hidden_states": _float(SEQ, "encoder_hidden_size|hidden_size"),
    "query_embeds": _float(32, "hidden_size"),
    "inputs_embeds": _float(SEQ, "hidden_size|d_model"),
    "inputs": _own_inputs,
    "noise_embeds": _float(SEQ, "hidden_size"),
    "context_hidden_states": _float(SEQ, "hidden_size"),
    "decoder_input_values": _float(SEQ, "num_mel_bins"),
}  # fmt: skip
ALWAYS = (
    "image_embeds_position_mask", "flattened_patches", "image_attention_mask", "bbox", "future_values", "future_time_features", "visual_feats",
    "visual_pos", "visual_embeds", "actions", "past_observed_mask", "duration_labels", "pitch_labels", "energy_labels", "spectrogram_labels",
)  # fmt: skip
"""Given although a class could do without: its layers for them would not run."""
