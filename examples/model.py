"""A small byte-level GPT and its data: the sources of Python's own standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


class Bytes(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes of real text, each with the next byte of every position."""

    def __init__(self, windows: int, context: int) -> None:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(stdlib.glob("*.py")))
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.windows, self.context = windows, context
        self.stride = (len(self.data) - context - 1) // windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self.stride
        window = self.data[begin : begin + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention, then an MLP, both with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=0.1 * self.training
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Logits of the next byte. The BatchNorm's running statistics change in forward, outside the optimizer."""

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        embedded = self.batch_norm(embedded.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(self.blocks(embedded)))
