"""A small GPT on characters, with spectral steps (Muon's in whitened coordinates) and no learning rate, against AdamW.

The text is the manual that comes with Python. AdamW gets as many steps as fit into about the same time, at
the best of the rates 0.004, 0.008, 0.016 and 0.032 (one seed).

pip install bprong
python examples/gpt.py
"""

import pydoc_data.topics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bprong

LENGTH, WIDTH, BATCH = 64, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norms[0](x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(z, z, z, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))))


def validation_loss(text: Tensor, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], steps: int) -> float:
    torch.manual_seed(0)
    model = GPT(int(text.max()) + 1)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    criterion = nn.CrossEntropyLoss()

    def loss_on(starts: Tensor) -> Tensor:
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        return criterion(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    for _ in range(steps):
        optimizer.zero_grad()
        loss_on(torch.randint(200_000, (BATCH,))).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        return float(loss_on(torch.arange(210_000, 230_000, 100)))


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    manual = "".join(pydoc_data.topics.topics.values())
    text = torch.tensor(list(manual.encode("ascii", "ignore")))
    optimizers = {
        "AdamW, lr=0.016": (lambda model: torch.optim.AdamW(model.parameters(), lr=0.016, weight_decay=0.1), 240),
        "BPRONG": (lambda model: bprong.BPRONG(model, "cross_entropy", step="spectral"), 120),
    }
    losses = {}
    for name, (make, steps) in optimizers.items():
        start = time.perf_counter()
        losses[name] = validation_loss(text, make, steps)
        print(f"{name:<15} {steps} steps, {time.perf_counter() - start:2.0f} s: validation loss {losses[name]:.3f}")
    return losses["BPRONG"]


if __name__ == "__main__":
    main()
