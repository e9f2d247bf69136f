"""Frozen weights quantized to 4 or 8 bits, for training adapters (QLoRA, arXiv 2305.14314).

Each row of a weight is divided into blocks of `BLOCK` elements. A block is stored as one code per
element and one scale, the block's largest magnitude. Devices receive codes and scales instead of
weights. A device dequantizes only the weights of the layer whose graph it is running.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cleave.errors import UsageError
from cleave.workload.stages import BLOCK, Bits, can_quantize

CODES: Final = "codes"
SCALES: Final = "scales"

# The 16 values of NF4: quantiles of the normal distribution (arXiv 2305.14314, appendix E).
NORMAL_FLOAT: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_MIDDLE: Final = 128  # 8-bit code of the value 0
_LARGEST: Final = 127
_AT_ONCE: Final = 2**22  # elements quantized at once; limits the memory of temporary tensors


def quantize(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to codes and scales.

    Args:
        weight: matrix of shape (rows, columns). The number of columns is a multiple of `BLOCK`.

    Returns:
        The codes as uint8, shape (rows, columns / codes per byte), and the scales as bf16, shape
        (rows, columns / BLOCK).
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // bits.codes_per_byte, dtype=torch.uint8)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.bfloat16)
    step = max(1, _AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        codes[part], scales[part] = _quantized(weight[part].detach().float(), bits)
    return codes, scales


def _quantized(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    blocks = weight.reshape(len(weight), -1, BLOCK)
    scales = blocks.abs().amax(-1).bfloat16()  # the codes below use the scale rounded to bf16
    unit = blocks / torch.where(scales == 0, 1, scales.float())[..., None]
    if bits is Bits.EIGHT:
        steps = (unit * _LARGEST).round().clamp(-_LARGEST, _LARGEST)
        return (steps + _MIDDLE).to(torch.uint8).flatten(1), scales
    values = torch.tensor(NORMAL_FLOAT)
    between = (values[1:] + values[:-1]) / 2
    nearest = torch.bucketize(unit, between).to(torch.uint8).flatten(1)
    return nearest[:, ::2] | nearest[:, 1::2] << 4, scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Convert the codes and scales from `quantize` to an fp32 matrix of shape (rows, columns).

    This function is exported into device graphs, so it may use only operations that ONNX Runtime
    supports on every device.
    """
    rows, blocks = scales.shape
    each = scales.float()
    if codes.shape[1] == blocks * BLOCK:
        values, each = codes.float() - _MIDDLE, each / _LARGEST
    else:
        table = torch.tensor(NORMAL_FLOAT, device=codes.device)
        # A lookup table of shape (256, 2): the two NF4 values that each byte encodes.
        pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1)
        values = F.embedding(codes.int(), pairs)
    return (values.reshape(rows, blocks, BLOCK) * each[..., None]).reshape(rows, blocks * BLOCK)


class _Product(torch.autograd.Function):
    """Autograd function x W^T that saves W in quantized form for the backward pass."""

    @staticmethod
    def forward(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        return x @ dequantize(codes, scales).to(x.dtype).t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, codes, scales = inputs
        ctx.save_for_backward(codes, scales)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ dequantize(*ctx.saved_tensors).to(gradient.dtype), None, None


class QuantizedLinear(nn.Module):
    """A linear layer whose frozen weight is quantized to 4 or 8 bits.

    The bias tensor is shared with the original layer `linear`.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits = bits
        codes, scales = quantize(linear.weight, bits)
        self.register_buffer(CODES, codes)
        self.register_buffer(SCALES, scales)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """Return a dequantized fp32 copy of the weight. Changes to the copy have no effect."""
        return dequantize(self.codes, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b in the dtype of x."""
        y: Tensor = _Product.apply(x, self.codes, self.scales)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """Return the feature counts, bias and bit width for the module's `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bits={int(self.bits)}"
        )

    def dequantized(self) -> nn.Linear:
        """Return an `nn.Linear` with the dequantized weight and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = self.bias
        return linear


def quantize_frozen(model: nn.Module, bits: Bits, keep: Collection[nn.Module] = ()) -> None:
    """Quantize the frozen linear layers inside a model's module lists, in place.

    Layers of a size that `can_quantize` rejects are left unchanged. Adapters cannot be merged into
    quantized layers: the `merge` method of the adapters' layer raises UsageError.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for parent in {module: None for layers in lists for module in layers.modules()}:
        for name, module in parent.named_children():
            if type(module) is not nn.Linear or module.weight.requires_grad or module in keep:
                continue
            if can_quantize(module.out_features, module.in_features, bits):
                setattr(parent, name, QuantizedLinear(module, bits))
                if hasattr(parent, "merge"):
                    vars(parent)["merge"] = _refuse_to_merge


def _refuse_to_merge(*_: object, **__: object) -> None:
    raise UsageError(
        "adapters cannot be merged into quantized weights; save them alone with save_pretrained, "
        "and merge them into the model that was quantized"
    )


def dequantize_all(model: nn.Module) -> None:
    """Replace each quantized layer of a model with a dequantized `nn.Linear`."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, QuantizedLinear):
                setattr(parent, name, module.dequantized())
                vars(parent).pop("merge", None)


def matrix_shapes(held: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return the shape (rows, columns) of each matrix among a layer's tensors, by name.

    A quantized weight is listed under the name of its codes, with the shape of the dequantized
    matrix. All dimensions of a tensor except the last are flattened into rows.
    """
    found = {}
    for name, tensor in held.items():
        parent, dot, last = name.rpartition(".")
        scales = held.get(f"{parent}{dot}{SCALES}") if last == CODES else None
        if scales is not None:
            found[name] = (scales.shape[0], scales.shape[1] * BLOCK)
        elif tensor.dim() > 1 and not (last == SCALES and f"{parent}{dot}{CODES}" in held):
            found[name] = (tensor.numel() // tensor.shape[-1], tensor.shape[-1])
    return found
