"""Video-RAG (Luo et al., 2024, "Video-RAG: Visually-aligned Retrieval-Augmented Long Video Comprehension").

Kept: tools write texts beside a long video: what is said (speech recognition), what is written (OCR on every frame) and what is
where (a detector on the frames most like the question). A retriever keeps the texts nearest to the question, and a video
language model answers from frames, kept texts and question together.

Every tool is a stub of the same kind and shape of work with random weights, and is labelled so (`stub`, and its parameters
are under `tools.` or `retriever.`): a convolution and Transformer blocks, then the likeliest word at each place. All have
one interface, frames, sound and question in, word numbers (b, texts, words) out, and can be exchanged one by one. The paper
trains nothing: tools are frozen and run without autograd, which the argmax and the top-k between them and the answer would
stop anyway; the loss is the video language model's own, as in fine-tuning it beneath fixed tools. How many texts there are
and how many are kept follows from the data in the paper, where a threshold cuts; here both are bounded by the config. Left
out: the model's own rewriting of the question into requests, the index on disk, relations between detected objects.
The defaults are near LLaVA-Video-72B with 64 frames, Whisper-large, Contriever and CLIP-L.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.multimodal.open_qwen2vl import Eye
from foretell.zoo.multimodal.piip import Decoder
from foretell.zoo.vision import vit


class Speech(nn.Module):
    """Sound (b, time, mels) → words heard: two convolutions, one of them halving time, then Transformer blocks."""

    stub = True

    def __init__(self, mels: int, dim: int, depth: int, heads: int, vocab_size: int, words: int) -> None:
        super().__init__()
        self.words = words
        self.conv1 = nn.Conv1d(mels, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(vit.Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, frames: Tensor, sound: Tensor, question: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound.transpose(1, 2))))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        heard = self.head(x).argmax(dim=-1)
        return heard[:, : heard.shape[1] // self.words * self.words].unflatten(1, (-1, self.words))


class Reader(nn.Module):
    """Frames (b, frames, 3, h, w) → words read on each, from as many strips of the picture."""

    stub = True

    def __init__(self, patch: int, dim: int, depth: int, heads: int, vocab_size: int, words: int) -> None:
        super().__init__()
        self.words = words
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.blocks = nn.ModuleList(vit.Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, frames: Tensor, sound: Tensor, question: Tensor) -> Tensor:
        x = self.patchify(frames.flatten(0, 1)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = F.adaptive_avg_pool1d(x.transpose(1, 2), self.words).transpose(1, 2)
        return self.head(x).argmax(dim=-1).unflatten(0, frames.shape[:2])


class Detector(nn.Module):
    """The `keys` frames most like the question → for each, pairs of what is there and in which cell of the picture."""

    stub = True

    def __init__(self, patch: int, dim: int, depth: int, heads: int, vocab_size: int, words: int, keys: int) -> None:
        super().__init__()
        self.words, self.keys = words, keys
        self.asked = nn.Embedding(vocab_size, dim)
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.blocks = nn.ModuleList(vit.Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, frames: Tensor, sound: Tensor, question: Tensor) -> Tensor:
        maps = self.patchify(frames.flatten(0, 1)).flatten(2).transpose(1, 2).unflatten(0, frames.shape[:2])
        likeness = torch.einsum("bfd,bd->bf", maps.mean(dim=2), self.asked(question).mean(dim=1).to(maps.dtype))
        chosen = likeness.topk(self.keys, dim=1).indices.sort(dim=1).values
        x = maps.gather(1, chosen[:, :, None, None].expand(-1, -1, *maps.shape[2:])).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        score, what = self.head(x).max(dim=-1)
        where = score.topk(self.words // 2, dim=1).indices
        return torch.stack([what.gather(1, where), where], dim=-1).flatten(1).unflatten(0, (-1, self.keys))


class Retriever(nn.Module):
    """Keeps the `kept` texts nearest to the question, the nearest first."""

    stub = True

    def __init__(self, dim: int, depth: int, heads: int, vocab_size: int, kept: int) -> None:
        super().__init__()
        self.kept = kept
        self.tokens = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(vit.Block(dim, heads) for _ in range(depth))

    def embed(self, ids: Tensor) -> Tensor:
        """(n, words) → (n, dim) of length one."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.normalize(x.mean(dim=1), dim=-1)

    def forward(self, texts: Tensor, question: Tensor) -> Tensor:
        near = self.embed(texts.flatten(0, 1)).unflatten(0, texts.shape[:2]) @ self.embed(question)[..., None]
        chosen = near.squeeze(-1).topk(self.kept, dim=1).indices
        return texts.gather(1, chosen[..., None].expand(-1, -1, texts.shape[2]))


class VideoRAG(nn.Module):
    def __init__(
        self, tools: dict[str, nn.Module], retriever: Retriever, eye: Eye, decoder: Decoder, image: int, pooled: int,
        video: tuple[int, int, int], asked: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.image, self.pooled, self.video, self.asked = image, pooled, video, asked
        self.tools = nn.ModuleDict(tools).requires_grad_(False)
        self.retriever = retriever.requires_grad_(False)
        self.eye = eye
        dim = decoder.tokens.embedding_dim
        self.projector = nn.Sequential(nn.Linear(eye.norm.normalized_shape[0], dim), nn.GELU(), nn.Linear(dim, dim))
        self.decoder = decoder

    @torch.no_grad()
    def retrieve(self, frames: Tensor, sound: Tensor, question: Tensor) -> Tensor:
        """Word numbers (b, kept, words) of the kept texts."""
        texts = torch.cat([tool(frames, sound, question) for tool in self.tools.values()], dim=1)
        return self.retriever(texts, question)

    def see(self, frames: Tensor) -> Tensor:
        x = self.eye(frames.flatten(0, 1)).transpose(1, 2).unflatten(2, (self.eye.grid, self.eye.grid))
        x = F.adaptive_avg_pool2d(x, self.pooled).flatten(2).transpose(1, 2)
        return self.projector(x).unflatten(0, frames.shape[:2]).flatten(1, 2)

    def forward(self, frames: Tensor, sound: Tensor, question: Tensor, answer: Tensor) -> Tensor:
        texts = self.retrieve(frames, sound, question).flatten(1)
        words = self.decoder.tokens(torch.cat([texts, question, answer], dim=1))
        return self.decoder(torch.cat([self.see(frames).to(words.dtype), words], dim=1), answer.shape[1])


def build(
    *,
    frames: int = 64,
    image: int = 384,
    patch: int = 14,
    pooled: int = 13,
    sounds: int = 3000,
    mels: int = 128,
    words: int = 32,
    keys: int = 16,
    kept: int = 32,
    asked: int = 64,
    speech_dim: int = 1280,
    speech_depth: int = 32,
    tool_dim: int = 1024,
    tool_depth: int = 24,
    retriever_dim: int = 768,
    retriever_depth: int = 12,
    tool_head_dim: int = 64,
    vision_dim: int = 1152,
    vision_depth: int = 27,
    vision_heads: int = 16,
    layers: int = 80,
    dim: int = 8192,
    heads: int = 64,
    kv_heads: int = 8,
    ffn: int = 29568,
    vocab_size: int = 152064,
    context: int = 256,
) -> nn.Module:
    """`sounds` is the length of the spectrogram, `asked` that of the question, `context` the answer's."""
    tools: dict[str, nn.Module] = {
        "speech": Speech(mels, speech_dim, speech_depth, speech_dim // tool_head_dim, vocab_size, words),
        "ocr": Reader(patch, tool_dim, tool_depth, tool_dim // tool_head_dim, vocab_size, words),
        "detector": Detector(patch, tool_dim, tool_depth, tool_dim // tool_head_dim, vocab_size, words, keys),
    }
    retriever = Retriever(retriever_dim, retriever_depth, retriever_dim // tool_head_dim, vocab_size, kept)
    eye = Eye(image, patch, vision_dim, vision_depth, vision_heads)
    decoder = Decoder(vocab_size, context, layers, dim, heads, kv_heads, ffn, 1e6, False, 0.0)
    return VideoRAG(tools, retriever, eye, decoder, image, pooled, (frames, sounds, mels), asked)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Frames and sound of a video, a question, and the tokens of its answer."""
    frames, sounds, mels = model.video
    tokens = torch.randint(0, model.decoder.vocab_size, (micro_batch, (seq or model.decoder.context) + 1))
    return {
        "frames": torch.randn(micro_batch, frames, 3, model.image, model.image),
        "sound": torch.randn(micro_batch, sounds, mels),
        "question": torch.randint(0, model.decoder.vocab_size, (micro_batch, model.asked)),
        "answer": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token of the answer."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
