"""Models of transformers, timm and torchvision, offline: `classes` picks the class, `batch` its inputs, `widen` mends a batch that is refused."""
