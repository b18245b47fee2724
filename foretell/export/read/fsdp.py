"""FSDP as accelerate and transformers' Trainer write it: versions 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping

from foretell.errors import FileFormatError
from foretell.export.read.reading import Reading

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of version 1, by the numbers 1 to 5."""
TAKEN: Mapping[str, str] = {
    "version": "which names the others have",
    "sharding_strategy": "dp_shard, dp_replicate, reshard_after_forward",
    "reshard_after_forward": "reshard_after_forward",
    "activation_checkpointing": "--recompute full or none",
}
IGNORED: Mapping[str, str] = {
    "state_dict_type": "checkpoints change no step", "cpu_ram_efficient_loading": "loading changes no step",
    "sync_module_states": "loading changes no step", "use_orig_params": "the same bytes either way",
    "auto_wrap_policy": "foretell shards block by block", "transformer_layer_cls_to_wrap": "foretell shards block by block",
    "transformer_cls_names_to_wrap": "foretell shards block by block",
    "limit_all_gathers": "foretell predicts FSDP2, which always limits them", "forward_prefetch": "foretell predicts FSDP2's own prefetching",
    "backward_prefetch": "foretell predicts FSDP2's own prefetching", "backward_prefetch_policy": "foretell predicts FSDP2's own prefetching",
}  # fmt: skip
CANNOT: Mapping[str, str] = {
    "offload_params": "offloading by FSDP is not predicted: the real run needs less of the device, and more time",
    "cpu_offload": "offloading by FSDP is not predicted: the real run needs less of the device, and more time",
    "activation_checkpointing_offload": "moving activations is not predicted from a file: the real run needs less of the device",
    "min_num_params": "units by size are not predicted: foretell shards block by block",
    "ignored_modules": "modules left out of FSDP are not predicted: they are whole on every rank",
}


def tables(prefixes: tuple[str, ...], kind: Mapping[str, str]) -> dict[str, str]:
    """A table with the names as a file has them."""
    return {f"{prefix}{name}": said for name, said in kind.items() for prefix in prefixes}


def read(reading: Reading, prefixes: tuple[str, ...], nodes: int) -> None:
    """Sharding, resharding and recompute; `prefixes` are what stands before each name, `nodes` what hybrid sharding replicates over."""
    paths = {name: reading.first(*(f"{prefix}{name}" for prefix in prefixes)) for name in TAKEN}
    version = reading.whole(paths["version"])
    strategy = _strategy(reading.word(paths["sharding_strategy"]), paths["sharding_strategy"])
    value = reading.get(paths["reshard_after_forward"])
    word = str(value).lower()
    by = paths["sharding_strategy"]
    if value is not None and word not in ("true", "false"):  # version 1 has a strategy here
        strategy, by = _strategy(str(value), paths["reshard_after_forward"]), paths["reshard_after_forward"]
    if strategy is not None and version == 2 and by == paths["sharding_strategy"]:
        reading.cannot(by, "version 2 of FSDP does not read it")
        strategy = None
    strategy = strategy or "FULL_SHARD"
    if strategy == "NO_SHARD":
        reading.axis("dp_replicate", -1, by)
        return
    reading.axis("dp_shard", -1, by, "" if by in reading.leaves else "FSDP shards over all ranks")
    if strategy.startswith("HYBRID") and nodes > 1:
        reading.axis("dp_replicate", nodes, by, "sharded inside a node, replicated over nodes")
    kept = strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") or word == "false"
    reading.take("reshard", not kept, paths["reshard_after_forward"] if word in ("true", "false") else by, "FSDP's default")
    again = reading.flag(paths["activation_checkpointing"])
    if again is not None:
        reading.take("recompute", "full" if again else "none", paths["activation_checkpointing"])


def _strategy(word: str | None, path: str) -> str | None:
    if word is None:
        return None
    name = word.upper().rpartition(".")[2]
    if name.isdigit() and 1 <= int(name) <= len(STRATEGIES):
        return STRATEGIES[int(name) - 1]
    name = name.removeprefix("_")
    if name not in STRATEGIES:
        raise FileFormatError(f"{path} is {word!r:.60}", f"one of {', '.join(STRATEGIES)}")
    return name
