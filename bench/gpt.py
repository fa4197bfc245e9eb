"""A small GPT to train on a CPU or a GPU: real steps for the benchmarks, of a state of about any size."""

import math
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128
HEAD_WIDTH = 64
LAYERS = 8
BYTES_PER_PARAMETER = 12
"""Weights and the two moments of AdamW, float32."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of shape (batch, time, width), one layer on."""
        batch, time, width = x.shape
        split = self.qkv(self.before_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    """Byte-level, with learnt positions."""

    def __init__(self, width: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each byte of `tokens`, shape (batch, time), from those before it."""
        x = self.bytes(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).transpose(1, 2), tokens[:, 1:])


@dataclass
class Job:
    """A model in training: `step` is one iteration on random bytes."""

    model: Gpt
    optimizer: torch.optim.Optimizer
    batch: int
    device: torch.device

    def step(self) -> None:
        """Forward, backward, update."""
        self.passes_s()
        self.optimizer.step()

    def passes_s(self) -> float:
        """Return the seconds of forward and backward; on a GPU of enqueuing them."""
        began_s = time.perf_counter()
        tokens = torch.randint(VOCABULARY, (self.batch, CONTEXT), device=self.device)
        loss: torch.Tensor = self.model(tokens)
        self.optimizer.zero_grad()
        loss.backward()
        return time.perf_counter() - began_s

    def synchronize(self) -> None:
        """Wait for the device, where there is one: what was enqueued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the state: parameters and the optimizer's."""
        states = self.optimizer.state.values()
        return [*self.model.parameters(), *(each for state in states for each in state.values())]

    def planned(self) -> list[torch.Tensor]:
        """Return a tensor of the size of each large one that the state has, or will have after the first step."""
        return [each for parameter in self.model.parameters() for each in (parameter, parameter, parameter)]

    @property
    def size_bytes(self) -> int:
        """Bytes of the state."""
        return sum(each.nbytes for each in self.tensors())


def job_of(size_bytes: int, *, batch: int = 1, device: str = "cpu") -> Job:
    """Return a job whose state takes about so much, after a first step that made the optimizer's."""
    job = new_job(size_bytes, batch=batch, device=device)
    job.step()
    return job


def new_job(size_bytes: int, *, batch: int = 1, device: str = "cpu") -> Job:
    """Return a job whose state will take about so much: the optimizer has none yet."""
    width = round(math.sqrt(size_bytes / BYTES_PER_PARAMETER / (12 * LAYERS)) / HEAD_WIDTH) * HEAD_WIDTH
    torch.manual_seed(0)
    model = Gpt(max(width, HEAD_WIDTH)).to(device)
    return Job(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch, torch.device(device))
