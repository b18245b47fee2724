"""What the process that forks tracing processes imports first in a sweep: transformers once, and not for every type."""

import contextlib
import importlib

from foretell.trace.hub.vision import mend_torchvision

PRELOAD = (
    "foretell.trace.store.cache", "foretell.trace.fold.deep", "foretell.trace.store.file", "foretell.trace.load.model",
)  # fmt: skip
mend_torchvision()
for _name in ("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.masking_utils",
              "transformers.loss.loss_utils", "transformers.generation", "timm", "torchvision", "diffusers", "torch_geometric"):  # fmt: skip
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
