"""Hugging Face Trainer: GPT-2 with its Conv1D layers and tied embeddings, and the Trainer's groups for weight decay.

pip install bprong 'transformers[torch]'
python examples/with_trainer.py
"""

from pydoc_data.topics import topics

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

import bprong


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    rows = torch.tensor(list("".join(topics.values()).encode("ascii", "ignore"))[:64000]).view(-1, 64)  # Python manual
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0))
    bprong.register(Conv1D, like=nn.Linear, transposed=True)  # GPT-2's own linear layer
    factory = bprong.BPRONG.factory(model, "cross_entropy", step="spectral", lr=0.02)
    trainer = Trainer(
        model,
        TrainingArguments(
            "gpt2", num_train_epochs=2, weight_decay=0.1, use_cpu=True, logging_steps=25, report_to="none"
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizer_cls_and_kwargs=(factory, {}),
    )
    return trainer.train().metrics["train_loss"]


if __name__ == "__main__":
    print(f"mean training loss: {main():.2f} nats per character")
