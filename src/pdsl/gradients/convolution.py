"""Per-record gradients of convolution kernels, in one to three dimensions."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pdsl.gradients.formulas import Rows

CHUNK = 32  # images whose patches stay in a cache
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def kernel_gradients(layer: Convolution, a: Tensor, delta: Tensor, records: int) -> Rows:
    """Gradients of the kernel: input patch times δ, summed over pixels. Several images of one record are summed.

    a [images, channels, ...] is the input, and δ [images, out, ...] the loss's derivative at the output.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    around = layer._reversed_padding_repeated_twice
    padded = pad(a, around, mode=mode) if any(around) else a
    if isinstance(layer, nn.Conv2d) and layer.groups == 1:
        out, channels, height, width = layer.weight.shape
        parts = zip(torch.split(padded, CHUNK), torch.split(delta, CHUNK), strict=True)
        g = torch.cat([_of_images(layer, *part).flatten(1) for part in parts])
        return Rows(_sum_images(g, records), ((out, height, width, channels), (0, 3, 1, 2)))
    return Rows(_sum_images(_of_patches(layer, padded, delta), records))


def _sum_images(g: Tensor, records: int) -> Tensor:
    return g if len(g) == records else g.view(records, -1, g.shape[1]).sum(1)


def _of_patches(layer: Convolution, padded: Tensor, delta: Tensor) -> Tensor:
    """Gradients [images, size] of any convolution: all patches are copied."""
    n, groups, axes = len(padded), layer.groups, range(delta.ndim - 2)
    patches = padded
    for axis in axes:
        size, stride, dilation = layer.kernel_size[axis], layer.stride[axis], layer.dilation[axis]
        patches = patches.unfold(2 + axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
    pixels = delta[0, 0].numel()
    # [images, channels, pixels..., kernel...] → [images · groups, channels/groups · kernel, pixels]
    last = patches.ndim - 1
    order = (0, 1, *(last - len(axes) + 1 + axis for axis in axes), *(2 + axis for axis in axes))
    columns = patches.permute(order).reshape(n * groups, -1, pixels)
    return torch.bmm(delta.reshape(n * groups, -1, pixels), columns.transpose(1, 2)).view(n, -1)


def _of_images(layer: nn.Conv2d, padded: Tensor, delta: Tensor) -> Tensor:
    """Gradients [images, out, k·k·channels] of a convolution over images without groups.

    The patches overlap, and copying all of them is most of the work. With one channel, the shifted image for each
    kernel position is copied. With several channels, only horizontal neighbours are copied, and one matrix product
    per kernel row is computed.
    """
    delta = delta.permute(0, 2, 3, 1)  # [images, rows, columns, out]
    n, height, width, out = delta.shape
    (down, right), (row_dilation, column_dilation) = layer.stride, layer.dilation
    seen = padded.permute(0, 2, 3, 1)  # channels last, as in memory
    rows = [slice(r, r + height * down, down) for r in range(0, layer.kernel_size[0] * row_dilation, row_dilation)]
    columns = [
        slice(c, c + width * right, right) for c in range(0, layer.kernel_size[1] * column_dilation, column_dilation)
    ]
    if layer.in_channels == 1:
        images = torch.stack([seen[:, r, c, 0] for r in rows for c in columns], dim=1)
        return torch.bmm(images.flatten(2), delta.reshape(n, -1, out)).transpose(1, 2)
    width_spanned = columns[-1].start + 1
    row_patches = seen.unfold(2, width_spanned, right)[..., ::column_dilation].transpose(3, 4)
    strips = row_patches[:, :, :width].reshape(n, seen.shape[1], width, -1)  # [images, rows, columns, k·channels]
    delta = delta.reshape(n, -1, out).transpose(1, 2)
    by_row = [torch.bmm(delta, strips[:, r].reshape(n, height * width, -1)) for r in rows]
    return torch.stack(by_row, dim=2).flatten(2)
