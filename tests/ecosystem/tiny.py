"""Small models of the packages, made from configurations, and what the tests compare them by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import bprong
from helpers import snapshot
from training import EXACT

VOCABULARY = 24
LENGTH = 6
CLASSES = 3
IGNORED = -100

Batch = Mapping[str, Tensor]


def tokens(batch: int = 8, seed: int = 2) -> Tensor:
    """Random tokens (batch, length); token 0 is padding and does not occur."""
    return torch.randint(1, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def language_batches(steps: int, batch: int = 8) -> list[dict[str, Tensor]]:
    """Batches for a language model, in which the first half of every other example is not a target."""
    found = []
    for step in range(steps):
        ids = tokens(batch, seed=step)
        labels = ids.clone()
        labels[::2, : LENGTH // 2 + 1] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of transformers' language models, computed outside of them: the mean over targets that count."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), ignore_index=IGNORED)


# Models ---------------------------------------------------------------------------------------------------------------

BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 8, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8, "pad_token_id": 0,
    "tie_word_embeddings": False, "initializer_range": 0.3,
}  # fmt: skip


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**DECODER))


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(1)
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**DECODER, **experts))


def gpt2(tied: bool = False) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def mamba() -> MambaForCausalLM:
    torch.manual_seed(1)
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY, hidden_size=8, state_size=4, num_hidden_layers=1, conv_kernel=3, pad_token_id=0,
            tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(1)
    return BertForSequenceClassification(BertConfig(**BERT, num_labels=CLASSES))


def question_answering() -> BertForQuestionAnswering:
    torch.manual_seed(1)
    return BertForQuestionAnswering(BertConfig(**BERT))


class Reads(nn.Module):
    """A model that returns one tensor, read from the output of another; the loss is computed outside of it."""

    def __init__(self, model: nn.Module, read: Callable[[Any], Tensor] = lambda output: output.logits) -> None:
        super().__init__()
        self.model = model
        self.read = read

    def forward(self, **batch: Tensor) -> Tensor:
        return self.read(self.model(**batch))


def replaced(
    model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], make: Callable[[Any], nn.Module]
) -> nn.Module:
    """A copy of a model in which all modules of a kind are replaced."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, kind):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, make(module))
    return model


def linear(W: Tensor, b: Tensor | None = None) -> nn.Linear:
    """A linear layer with copies of this weight (out, in) and bias."""
    made = nn.Linear(W.shape[1], W.shape[0], bias=b is not None, dtype=W.dtype)
    made.weight.data = W.detach().clone()
    if b is not None:
        made.bias.data = b.detach().clone()
    return made


# Training and comparing -----------------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, loss: Any = "cross_entropy", **settings: Any) -> bprong.BPRONG:
    """BPRONG at a fixed rate with exact statistics of the present batch, refreshed at every second step."""
    return bprong.BPRONG(model, loss, **({"lr": 0.05, "every": 2, "options": EXACT} | settings))


def train(
    model: nn.Module, optimizer: bprong.BPRONG, batches: Iterable[Any], loss_of: Callable[[nn.Module, Any], Tensor]
) -> list[float]:
    """Trains a model and returns its loss at every step."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def inside(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model of transformers computes from labels."""
    return model(**batch).loss


def outside(model: nn.Module, batch: Batch) -> Tensor:
    """The same loss of a language model that returns logits, computed from these."""
    return next_token_loss(model(input_ids=batch["input_ids"]), batch["labels"])


def updates(model: nn.Module, before: Mapping[str, Tensor]) -> Tensor:
    """How far all parameters and buffers of a model moved, as one vector."""
    return torch.cat([(value - before[name]).flatten().double() for name, value in snapshot(model).items()])


def whitened_share(optimizer: bprong.BPRONG, model: nn.Module) -> float:
    """The share of a model's numbers in parameters that are whitened."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    fallback = sum(sizes[name] for name in optimizer.report().fallback)
    return 1 - fallback / sum(sizes.values())
