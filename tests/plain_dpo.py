"""DPO of a LoRA on a small GPT-2 or Llama, in plain torch and float64: an oracle for real runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from prefed.runs.loaded_run import LoadedRun

Lora = dict[str, Tensor]


class PlainDPO:
    """The losses of a run's clients, each over all of its training pairs.

    Args:
        run: its model is a GPT-2 or a Llama, its layout a LoRA on all linear layers, with or without a head.
    """

    def __init__(self, run: LoadedRun) -> None:
        name = run.record.config["model"]["name"]
        self.model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager").double().eval()
        if "head/weight" in run.backbone.initial:
            self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.base = {key: value.detach() for key, value in self.model.named_parameters()}
        self.scaling, self.beta = run.backbone.scaling, run.experiment.method.settings.beta
        dataset = run.trainers.dataset
        self.pairs = {
            client: [dataset.tokens.pair(int(row)) for row in data.train]
            for client, data in dataset.clients.items()
        }
        self.first: Lora = {name: value.double() for name, value in run.backbone.initial.items()}
        self._reference: dict[tuple[str, int], float] = {}

    def loss(self, lora: Lora, client: str) -> Tensor:
        """Mean of −log σ(β(Δ_θ − Δ_ref)) over the client's pairs."""
        losses = []
        for row, pair in enumerate(self.pairs[client]):
            if (client, row) not in self._reference:
                with torch.no_grad():
                    # B starts at zero, so the first LoRA is the reference.
                    self._reference[client, row] = float(self._margin(self.first, pair))
            margin = self._margin(lora, pair) - self._reference[client, row]
            losses.append(-torch.nn.functional.logsigmoid(self.beta * margin))
        return torch.stack(losses).mean()

    def gradient(self, lora: Lora, client: str) -> tuple[Tensor, float]:
        """The gradient of :meth:`loss`, flat, and its value."""
        leaves = {name: value.detach().requires_grad_() for name, value in lora.items()}
        loss = self.loss(leaves, client)
        slopes = torch.autograd.grad(loss, [*leaves.values()])
        return flat(dict(zip(leaves, slopes, strict=True))), float(loss.detach())

    def hessian_product(self, lora: Lora, client: str, vector: Tensor) -> Tensor:
        """The Hessian of :meth:`loss` times a flat vector."""
        leaves = {name: value.detach().requires_grad_() for name, value in lora.items()}
        slopes = torch.autograd.grad(self.loss(leaves, client), [*leaves.values()], create_graph=True)
        along = torch.cat([slope.reshape(-1) for slope in slopes]) @ vector
        return torch.cat([part.reshape(-1) for part in torch.autograd.grad(along, [*leaves.values()])])

    def train(self, lora: Lora, client: str, *, steps: int, lr: float, clip: float) -> Lora:
        """Steps of gradient descent on all pairs at once, each gradient clipped to the norm ``clip``."""
        for _ in range(steps):
            slope, _ = self.gradient(lora, client)
            slope = slope * min(1.0, clip / float(slope.norm()))
            lora = unflat(flat(lora) - lr * slope, lora)
        return lora

    def _margin(self, lora: Lora, pair: object) -> Tensor:
        chosen, rejected = (self._logprob(lora, pair.prompt, ids) for ids in (pair.chosen, pair.rejected))
        return chosen - rejected

    def _logprob(self, lora: Lora, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *response]], dtype=torch.int64)
        weights = dict(self.base)
        for name in lora:
            if name.endswith("/A"):
                _, block, module, _ = name.split("/")
                product = self.scaling * lora[f"lora/{block}/{module}/B"] @ lora[name]
                if self.model.config.model_type == "llama":
                    key = f"model.layers.{block}.{module}.weight"
                    weights[key] = weights[key] + product
                else:
                    # GPT-2 has its weights the other way round: [in, out].
                    key = f"transformer.h.{block}.{module}.weight"
                    weights[key] = weights[key] + product.T
            elif name == "head/weight":
                weights["lm_head.weight"] = lora[name]
        logits = functional_call(self.model, weights, (ids,)).logits[0, len(prompt) - 1 : -1]
        at = torch.tensor(list(map(int, response)))[:, None]
        return logits.log_softmax(-1).gather(1, at).sum()


def flat(lora: Lora) -> Tensor:
    """All tensors one after the other."""
    return torch.cat([value.reshape(-1) for value in lora.values()])


def unflat(vector: Tensor, like: Lora) -> Lora:
    """The inverse of :func:`flat`."""
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view_as(value) for part, (name, value) in zip(parts, like.items(), strict=True)}
