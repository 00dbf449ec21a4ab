"""A small GPT, the text it reads and the hash of its weights. Shared by both torch examples.

Batches are a pure function of seed, step and rank: nothing about the data has to be saved.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CORPUS = Path(__file__).with_name("corpus.txt")


@dataclass(frozen=True)
class Size:
    """How large the model and its batches are."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 4
    dropout: float = 0.1


FULL = Size()
TINY = Size(layers=2, width=48, heads=2, context=32, batch=2)
"""For tests: a step takes a tenth of the time."""


class Corpus:
    """The text as token numbers, one per distinct character."""

    def __init__(self, path: Path = CORPUS) -> None:
        text = path.read_text(encoding="ascii")
        alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(alphabet)}
        self.vocabulary = len(alphabet)
        self._tokens = torch.tensor([number[character] for character in text])

    def batch(
        self, size: Size, *, seed: int, step: int, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and the characters that follow them."""
        mixed = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "little"))
        last = len(self._tokens) - size.context - 1
        starts = torch.randint(last, (size.batch,), generator=generator)
        window = self._tokens[starts[:, None] + torch.arange(size.context + 1)]
        return window[:, :-1], window[:, 1:]


class Block(nn.Module):
    """Attention over the past, then a feed-forward layer, each on top of what was there."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.before_feed = nn.LayerNorm(size.width)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        self.drop = nn.Dropout(size.dropout)
        self.register_buffer("past", torch.ones(size.context, size.context).tril().bool())
        self.past: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        x = x + self.drop(self._attend(self.before_attention(x)))
        fed: torch.Tensor = x + self.drop(self.feed(self.before_feed(x)))
        return fed

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        # Written out, so that which kernel computes it depends on nothing.
        weight = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        weight = weight.masked_fill(~self.past[:length, :length], float("-inf")).softmax(dim=-1)
        mixed = (self.drop(weight) @ value).transpose(1, 2).reshape(batch, length, width)
        projected: torch.Tensor = self.project(mixed)
        return projected


class TinyGPT(nn.Module):
    """Predicts the next character."""

    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss over all predicted characters."""
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of both examples."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over all parameters, in the model's own order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
