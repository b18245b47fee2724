"""States that were saved in another form: what a run goes on with is what was saved, as exactly as its own form allows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.runtime.offload.forms import CODE, FIRST, MASTER, REST, SCALE, SECOND, joined, take_apart
from foretell.trace.moments import codes


def weights(weight: Tensor, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Exact weights that were saved in another form, or in none beside the weights themselves, which are flat."""
    if not own.keys() & {MASTER, REST} or (MASTER if MASTER in own else REST) in saved:
        return
    if MASTER in saved:
        exact = saved[MASTER].to(weight.device, torch.float32, copy=True).reshape(-1)
    else:
        exact = weight.float()
        if REST in saved:
            joined(weight, saved[REST].to(weight.device).reshape(-1), exact)
    if MASTER in own:
        own[MASTER].copy_(exact.view(own[MASTER].shape))
    else:
        rest = torch.empty_like(exact, dtype=torch.int16)
        take_apart(exact, weight, rest)
        own[REST].copy_(rest.view(own[REST].shape))


def moments(name: str, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Moments that were saved as codes and are not kept so, or the other way round."""
    for moment in (FIRST, SECOND):
        if (moment if moment in own else moment + CODE) in saved:
            continue
        if moment in own and moment + CODE in saved:
            value = _decoded(moment, saved[moment + CODE], saved[moment + SCALE])
            own[moment].copy_(value.view(own[moment].shape))
        elif moment in saved:
            code, scale = _encoded(moment, saved[moment])
            own[moment + CODE].copy_(code.view(own[moment + CODE].shape))
            own[moment + SCALE].copy_(scale.view(own[moment + SCALE].shape))
        else:
            raise UserError(
                f"what was saved of the optimizer for {name} is {', '.join(sorted(saved))}: no {moment}, in no format",
                "resume with the optimizer it was saved with, or begin anew from its weights with --init-from",
            )


def _decoded(moment: str, code: Tensor, scale: Tensor) -> Tensor:
    whole = code.new_zeros(codes.padded(code.numel()))
    whole[: code.numel()].copy_(code.reshape(-1))
    out = torch.empty_like(whole, dtype=torch.float32)
    if moment == FIRST:
        codes.decode_first(whole, scale.reshape(-1), out, torch.empty_like(out))
    else:
        codes.decode_second(whole, scale.reshape(-1), out)
    return out[: code.numel()]


def _encoded(moment: str, value: Tensor) -> tuple[Tensor, Tensor]:
    elements = value.numel()
    whole = torch.zeros(codes.padded(elements), device=value.device)
    whole[:elements].copy_(value.reshape(-1))
    code = torch.empty_like(whole, dtype=torch.int8 if moment == FIRST else torch.uint8)
    scale = whole.new_empty(whole.numel() // codes.BLOCK)
    encode = codes.encode_first if moment == FIRST else codes.encode_second
    encode(whole, code, scale, torch.empty_like(whole))
    return code[:elements], scale
