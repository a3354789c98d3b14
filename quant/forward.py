"""
One decoder layer at a time, for many sequences at once: what a conversion calibrates on and what it is measured by.

It computes the function of the engine's decoder (Llama, Mistral, Qwen2, Qwen3) without its blocks and plans.  A layer
is cut into four stages, each ending where the next linear layers read, so that their inputs lie open:

    x --norm--> [qkv] --attention--> [o] --+ x, norm--> [gate_up] --silu(g) * u, mix--> [down] --+ x-->

`x` is the residual stream, `z` what the linear layers of the next stage read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.formats.architecture import Architecture
from quant.formats.checkpoint import Checkpoint
from quant.formats.errors import ModelError
from quant.formats.mixing import mix
from quant.formats.rope import RopeTable

Stage = Literal["qkv", "o", "gate_up", "down"]
STAGES: tuple[Stage, ...] = ("qkv", "o", "gate_up", "down")
LINEARS: dict[Stage, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
ALL_LINEARS = tuple(name for stage in STAGES for name in LINEARS[stage])

Weights = Mapping[str, Tensor]
"""The tensors of one layer by their names after `model.layers.3.`, all of one dtype."""
Linear = Callable[[str, Tensor], Tensor]
"""The linear layer of that name on [..., in]: the place where quantized ones step in."""


def layer_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer, by their names on disk, in the order in which they are written."""
    sizes = {
        "self_attn.q_proj": (a.query_size, a.hidden, a.qkv_bias),
        "self_attn.k_proj": (a.kv_size, a.hidden, a.qkv_bias),
        "self_attn.v_proj": (a.kv_size, a.hidden, a.qkv_bias),
        "self_attn.o_proj": (a.hidden, a.query_size, a.output_bias),
        "mlp.gate_proj": (a.intermediate, a.hidden, a.mlp_bias),
        "mlp.up_proj": (a.intermediate, a.hidden, a.mlp_bias),
        "mlp.down_proj": (a.hidden, a.intermediate, a.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (a.hidden,)}
    for name, (rows, columns, bias) in sizes.items():
        if name == "mlp.gate_proj":
            shapes["post_attention_layernorm.weight"] = (a.hidden,)
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
        if a.qk_norm and name in ("self_attn.q_proj", "self_attn.k_proj"):
            shapes[f"{name.removesuffix('_proj')}_norm.weight"] = (a.head_dim,)
    return shapes


def read_layer(checkpoint: Checkpoint, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of one layer.  Raises ModelError."""
    shapes = layer_shapes(checkpoint.architecture)
    for name in ALL_LINEARS:  # the engine would add them: without them, another model would be measured
        bias = f"model.layers.{layer}.{name}.bias"
        if f"{name}.bias" not in shapes and checkpoint.has(bias):
            rows = shapes[f"{name}.weight"][0]
            if bool(checkpoint.read(bias, (rows,), torch.float32).any()):
                raise ModelError(f"the file has {bias}, of which its configuration says nothing: set attention_bias")
    return {name: checkpoint.read(f"model.layers.{layer}.{name}", shape, dtype) for name, shape in shapes.items()}


def plain(weights: Weights) -> Linear:
    """Linear layers as they are."""

    def linear(name: str, z: Tensor) -> Tensor:
        return F.linear(z, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    return linear


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm; the mean square in float32, whatever `x` is."""
    values = x.float()
    scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return scaled.to(x.dtype) * weight


class LayerForward:
    """The function of one layer for sequences that all start at position 0."""

    def __init__(self, a: Architecture, layer: int, points: int = 0) -> None:
        """`points`: what the inputs of down_proj are mixed by, see `quant.formats.mixing`."""
        self._a = a
        self._window = a.windows[layer]
        self._points = points

    def begin(self, x: Tensor, weights: Weights) -> Tensor:
        """What the first stage reads."""
        return norm(x, weights["input_layernorm.weight"], self._a.norm_epsilon)

    def advance(self, stage: Stage, x: Tensor, z: Tensor, weights: Weights, linear: Linear) -> tuple[Tensor, Tensor]:
        """(x, z) behind the linear layers of `stage`; shapes [sequences, tokens, ...]."""
        if stage == "qkv":
            rotation = rotations(self._a, x.shape[1], x.device)
            return x, attend(*queries_keys_values(self._a, z, weights, linear, rotation), self._window)
        if stage == "o":
            x = x + linear("self_attn.o_proj", z)
            return x, norm(x, weights["post_attention_layernorm.weight"], self._a.norm_epsilon)
        if stage == "gate_up":
            return x, mix(F.silu(linear("mlp.gate_proj", z)) * linear("mlp.up_proj", z), self._points)
        x = x + linear("mlp.down_proj", z)
        return x, x

    def whole(self, x: Tensor, weights: Weights, linear: Linear | None = None) -> Tensor:
        """All four stages."""
        z = self.begin(x, weights)
        for stage in STAGES:
            x, z = self.advance(stage, x, z, weights, linear or plain(weights))
        return x


Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, float32 [tokens, head_dim]."""


def rotations(a: Architecture, tokens: int, device: torch.device, first: int = 0) -> Rotation:
    """For the positions `first`, `first` + 1, ..."""
    table = RopeTable(a.rope, head_dim=a.head_dim, context_max=first + tokens)
    cos, sin = table.rows(torch.arange(first, first + tokens))
    return cos.squeeze(1).to(device), sin.squeeze(1).to(device)


def queries_keys_values(
    a: Architecture, z: Tensor, weights: Weights, linear: Linear, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed where the model does that, and rotated: [sequences, heads, tokens, head_dim]."""
    query, key, value = (linear(name, z).unflatten(-1, (-1, a.head_dim)).transpose(1, 2) for name in LINEARS["qkv"])
    if a.qk_norm:
        query = norm(query, weights["self_attn.q_norm.weight"], a.norm_epsilon)
        key = norm(key, weights["self_attn.k_norm.weight"], a.norm_epsilon)
    return _rotate(query, rotation), _rotate(key, rotation), value


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    values = heads.float()
    return (values * cos + values.roll(heads.shape[-1] // 2, -1) * sin).to(heads.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Causal attention of as many newest positions as `query` has: [sequences, tokens, query heads * head_dim]."""
    tokens, known = query.shape[2], key.shape[2]
    if tokens == 1:  # the newest token sees all of the tail: query heads of one key head are rows of one product
        key, value = (key, value) if not window else (key[:, :, -window:], value[:, :, -window:])
        rows = query.squeeze(2).unflatten(1, (key.shape[1], -1))
        return F.scaled_dot_product_attention(rows, key, value).flatten(1).unsqueeze(1)
    mask = None
    if tokens != known or 0 < window < known:
        age = torch.arange(known - tokens, known, device=query.device)[:, None] - torch.arange(known, device=key.device)
        mask = (age >= 0) & (age < (window or known))
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return attended.transpose(1, 2).flatten(2)


class Stream:
    """
    Sequences on their way through the layers.

    They wait in the host's memory, in batches of one length each; a batch at a time goes to the device.
    """

    def __init__(self, batches: Sequence[Tensor], embedding: Tensor) -> None:
        """`batches`: token ids [sequences, tokens]."""
        self.x = [F.embedding(batch, embedding).float() for batch in batches]
        self.z = self.x

    def begin(self, layer: LayerForward, weights: Weights) -> None:
        """Enter a layer: `z` is what its first stage reads."""
        device = weights["input_layernorm.weight"].device
        self.z = [layer.begin(x.to(device), weights).cpu() for x in self.x]

    def stages(self, layer: LayerForward, weights: Weights) -> Iterator[tuple[Stage, list[Tensor]]]:
        """What each stage of a layer reads, without going on."""
        ahead = Stream((), torch.empty(0))
        ahead.x = list(self.x)
        ahead.begin(layer, weights)
        for stage in STAGES:
            yield stage, ahead.z
            if stage != STAGES[-1]:
                ahead.advance(layer, stage, weights, plain(weights))

    def advance(self, layer: LayerForward, stage: Stage, weights: Weights, linear: Linear) -> None:
        """Pass the linear layers of one stage."""
        device = weights["input_layernorm.weight"].device
        x, z = self.x, self.z
        self.x, self.z = [], []
        while x:  # the old ones are freed as the new ones come
            moved, read = layer.advance(stage, x.pop(0).to(device), z.pop(0).to(device), weights, linear)
            self.x.append(moved.cpu())
            self.z.append(read.cpu())
