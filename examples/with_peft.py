"""PEFT: the factors of LoRA are linear layers and are whitened; the frozen weights stay as they are.

pip install bprong transformers peft
python examples/with_peft.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import bprong


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))  # in practice LlamaForCausalLM.from_pretrained(…)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    model.print_trainable_parameters()
    optimizer = bprong.BPRONG(model, "cross_entropy")  # the loss that the model computes from its labels
    losses = []
    for _ in range(30):
        ids = (
            torch.arange(16) * torch.randint(1, 4, (32, 1)) + torch.randint(10, (32, 1))
        ) % 100  # counting by 1, 2, 3
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}; {len(optimizer.report().layers)} factors are whitened")
    return losses[-1] / losses[0]


if __name__ == "__main__":
    main()
