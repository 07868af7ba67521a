"""The ``[model]`` table."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from prefed.core.lazy import torch
from prefed.core.strict_settings import StrictModel

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float16"]
VARIATIONAL = "variational"
"""Part of a selector with latent tastes: MLPs, attention, heads and decoder."""
PROTOTYPES = "prototypes"
"""Part with the prototypes P ``[M, d_z]``."""
POSTERIOR = "posterior"
"""Part that a client sends about its taste: mean μ̄ and log σ̄² ``[d_z]`` of its posterior."""
LATENT = "latent"
"""Part with the taste z ``[d_z]`` that a client judges with."""
DECODER = (f"{VARIATIONAL}/decoder/weight", f"{VARIATIONAL}/decoder/bias")
"""Tensors that determine the effect of z and the responses; if they are zero, there is none."""
TASTE_MAP = "taste_map"
"""Part of a policy for tastes: W ``[d, d_z]`` and b ``[d]``."""
MIXTURE = "mixture"
"""Part with the logits of a client's weights ``[K]``."""
BASIS = "basis"
"""Part with the rewards of LoRe."""
IDEAL = "ideal"
"""Part with the projection and the prototypes of PAL."""


def present_devices() -> str:
    """Return the devices on this machine by their names in ``[model] device``, fastest first."""
    found = [f"cuda ({n} of them)" if n > 1 else "cuda"] if (n := torch.cuda.device_count()) else []
    found += ["mps"] if torch.backends.mps.is_available() else []
    return ", ".join([*found, "cpu"])


class LoraSettings(StrictModel):
    """Shared low-rank adapter (Hu et al. 2022)."""

    rank: int = Field(8, ge=1, description="rank r of each pair of factors")
    alpha: float = Field(16.0, gt=0, description="scale: BA is multiplied by alpha / rank")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout on the adapter's input while training")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="names of the linear modules to adapt, or all-linear for all except the head; default: "
        "attention and feed-forward",
    )


class BottleneckSettings(StrictModel):
    """Personal bottleneck in place of the final norm (FedPDPO, arXiv:2603.19741)."""

    width: int = Field(256, ge=1, description="width of the bottleneck")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout inside the bottleneck while training")


class RewardSettings(StrictModel):
    """Personal reward head (FedPDPO, arXiv:2603.19741)."""

    width: int = Field(256, ge=1, description="width of the hidden layer")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout on the hidden layer while training")
    pool: Literal["all", "completion"] = Field(
        "all", description="tokens to average over: all, prompt and response; or completion, the response"
    )


class VariationalSettings(StrictModel):
    """Selector whose reward depends on a latent taste z (FedVPA-GP, arXiv:2605.30873)."""

    latent: int = Field(32, ge=1, description="width of the latent taste z")
    widths: tuple[int, ...] = Field(
        (512, 256, 128),
        min_length=1,
        description="layer widths of the response MLP and of the pair encoder",
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout inside the response MLP while training")
    feature: Literal["apart", "difference"] = Field(
        "apart",
        description="feature of a pair: apart, the difference of MLP outputs; or the MLP of the difference",
    )
    decoder: Literal["conditioned", "residual"] = Field(
        "conditioned",
        description="effect of z: conditioned, it weights the MLP features; or residual, it is added to "
        "the letters' logits",
    )
    pool: Literal["end", "mean"] = Field(
        "mean", description="hidden state that represents a response: end-of-text, or the mean over tokens"
    )
    layer: int | None = Field(
        None,
        ge=1,
        description="earlier block whose output represents a response, each token's state divided by its "
        "root mean square; default: the last block, after the final norm",
    )
    prototypes: int = Field(2, ge=1, description="number of taste prototypes")
    scale: float = Field(5.0, gt=0, description="initial length of the prototypes")

    @model_validator(mode="after")
    def _fits(self) -> VariationalSettings:
        if self.prototypes > self.latent:
            raise ValueError(
                f"prototypes = {self.prototypes} exceeds latent = {self.latent}: they cannot be orthogonal; "
                "raise latent"
            )
        if min(self.widths) < 1:
            raise ValueError(f"widths must all be at least 1, not {list(self.widths)}")
        return self


class MixtureSettings(StrictModel):
    """Shared rewards of which each client has its own mixture: LoRe (arXiv:2504.14439), PAL (2406.08469)."""

    count: int = Field(8, ge=1, description="number of shared rewards (lore) or prototypes (pal)")
    width: int = Field(64, ge=1, description="width of the space of ideal points (pal)")


class ModelConfig(StrictModel):
    """The causal language model to align."""

    name: str = Field(min_length=1, description="a folder with a Hugging Face model, or a hub name")
    revision: str | None = Field(None, description="hub revision: a branch, tag or commit")
    train: Literal["lora", "full"] = Field(
        "lora",
        description="tensors to train and send: lora, an adapter over the frozen model; or full, all weights",
    )
    lora: LoraSettings = Field(LoraSettings(), description="the shared adapter")
    bottleneck: BottleneckSettings = Field(BottleneckSettings(), description="for methods with a bottleneck")
    reward: RewardSettings = Field(RewardSettings(), description="for methods with a reward head")
    variational: VariationalSettings = Field(
        VariationalSettings(), description="for selectors with a latent taste"
    )
    mixture: MixtureSettings = Field(
        MixtureSettings(), description="for rewards that clients mix: lore and pal"
    )
    dtype: Dtype | None = Field(
        None,
        description="dtype of the frozen model; float16 requires a GPU; default: that of the checkpoint on a "
        "GPU, float32 on a CPU",
    )
    quantize: Literal["nf4", "fp4"] | None = Field(
        None,
        description="4-bit format for the linear layers of the frozen model (bitsandbytes); default: dtype",
    )
    kernels: Literal["liger", "torch"] | None = Field(
        None,
        description="kernels for norms, gates and rotary embedding: liger, those of liger-kernel; or torch, "
        "PyTorch's; default: liger on a CUDA device if it is installed and supports the model, else torch",
    )
    device: Device = Field("auto", description="device of the model")
    gpus: int = Field(
        1,
        ge=1,
        description="number of CUDA devices over which a process spreads its model, block by block; for a "
        "model larger than one of them",
    )
    fast: bool = Field(True, description="use fast paths if the model family supports them")
    checkpointing: bool = Field(
        False,
        description="gradient checkpointing: recompute activations in the backward pass, which takes less "
        "memory and more time, with the same results",
    )

    @field_validator("device", mode="before")
    @classmethod
    def _known_device(cls, value: Any) -> Any:
        if value in get_args(Device):
            return value
        remedy = ""
        if isinstance(value, str) and value.startswith("cuda:"):
            remedy = f'; to choose one of several GPUs, set [engine] devices = ["{value}"]'
        names = ", ".join(map(repr, get_args(Device)))
        raise ValueError(f"should be one of {names}; this machine has {present_devices()}{remedy}")

    @model_validator(mode="after")
    def _trainable(self) -> ModelConfig:
        if self.train == "full" and self.dtype not in (None, "float32"):
            raise ValueError(f"train = 'full' requires float32: remove dtype = {self.dtype!r}")
        if self.gpus > 1 and (self.train == "full" or self.device not in ("auto", "cuda")):
            key = "train = 'full'" if self.train == "full" else f"device = {self.device!r}"
            raise ValueError(f"gpus = {self.gpus} spreads a frozen model over CUDA devices: remove {key}")
        if self.train == "full" and self.quantize is not None:
            raise ValueError(
                f"train = 'full' cannot train 4-bit weights: remove quantize = {self.quantize!r}"
            )
        return self
