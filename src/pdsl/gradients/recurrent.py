"""GRU, LSTM and RNN with formulas for per-record gradients.

The recurrence is unrolled. Its backward pass gives the loss's derivative at every step's product with the recurrent
weight, so that this weight is treated like a linear layer over the sequence of hidden states.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pdsl.gradients.formulas import Gradient, Products, Rows
from pdsl.gradients.linear import run_linear
from pdsl.gradients.tape import Tape
from pdsl.models.zoo import ALIGNMENT

Recurrent = nn.GRU | nn.LSTM | nn.RNN


class _Recurrence(torch.autograd.Function):
    """Hidden states [T + 1, m, H] of all steps, and the cells of an LSTM.

    `steps` stands for the steps' products with the recurrent weight: its values are not used, but its gradient is the
    derivative of the loss at these products.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: str, g: Tensor, steps: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor]:
        T, m, width = g.shape
        H = h.shape[1]
        hidden, cells = g.new_empty(T + 1, m, H), g.new_empty(T + 1 if kind == "LSTM" else 0, m, H)
        saved = g.new_empty(T, m, 4 * H if kind in ("GRU", "LSTM") else 0)
        hidden[0] = h
        cells[:1] = c
        transposed = weight.T.contiguous()
        for t in range(T):
            product = torch.addmm(bias, _aligned(h), transposed)[:, :width]
            if kind == "GRU":
                update = torch.sigmoid(product[:, : 2 * H] + g[t, :, : 2 * H])
                new = torch.tanh(torch.addcmul(g[t, :, 2 * H :], update[:, :H], product[:, 2 * H :]))
                torch.cat([update, new, product[:, 2 * H :]], dim=1, out=saved[t])
                h = torch.lerp(new, h, update[:, H:], out=hidden[t + 1])
            elif kind == "LSTM":
                i, f, new, o = (product + g[t]).chunk(4, 1)
                gates = [i.sigmoid(), f.sigmoid(), new.tanh(), o.sigmoid()]
                torch.cat(gates, dim=1, out=saved[t])
                c = torch.addcmul(gates[1] * c, gates[0], gates[2], out=cells[t + 1])
                h = torch.mul(gates[3], c.tanh(), out=hidden[t + 1])
            else:
                hidden[t + 1] = (product + g[t]).tanh_() if kind == "RNN_TANH" else (product + g[t]).relu_()
                h = hidden[t + 1]
        ctx.save_for_backward(hidden, cells, saved, weight)
        ctx.kind, ctx.width = kind, width
        return hidden, cells

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor, d_cells: Tensor) -> tuple[Tensor | None, ...]:
        hidden, cells, saved, weight = ctx.saved_tensors
        T, (m, H) = len(hidden) - 1, hidden.shape[1:]
        d_input = hidden.new_empty(T, m, ctx.width)
        back = _GRU if ctx.kind == "GRU" else _LSTM if ctx.kind == "LSTM" else _RNN
        state = back(ctx.kind, hidden, cells, saved, d_input)
        dh, dc = d_hidden[T], d_cells[T] if ctx.kind == "LSTM" else None
        for t in range(T - 1, -1, -1):
            step, rest, dc = state.step(t, dh, dc)
            dh = torch.mm(_aligned(step), weight[: _multiple(ctx.width)])[:, :H]
            dh = dh + d_hidden[t] if rest is None else dh + rest + d_hidden[t]
        return None, d_input, state.d_steps, None, None, dh, dc


class _GRU:
    """h' = (1 − z) tanh(a + r p) + z h, with p the product with the recurrent weight."""

    def __init__(self, kind: str, hidden: Tensor, cells: Tensor, saved: Tensor, d_input: Tensor):
        self.r, self.z, new, product = saved.chunk(4, 2)
        self.of_new = (1 - self.z) * (1 - new.square())
        self.of_update = (hidden[:-1] - new) * self.z * (1 - self.z)
        self.of_reset = product * self.r * (1 - self.r)
        self.d_input, self.d_steps = d_input, torch.empty_like(d_input)

    def step(self, t: int, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        H = dh.shape[1]
        d, into = self.d_steps[t], self.d_input[t]
        new = torch.mul(dh, self.of_new[t], out=into[:, 2 * H :])
        torch.mul(new, self.of_reset[t], out=d[:, :H])
        torch.mul(dh, self.of_update[t], out=d[:, H : 2 * H])
        torch.mul(new, self.r[t], out=d[:, 2 * H :])
        into[:, : 2 * H] = d[:, : 2 * H]
        return d, dh * self.z[t], None


class _LSTM:
    """c' = f c + i tanh(a), h' = o tanh(c')."""

    def __init__(self, kind: str, hidden: Tensor, cells: Tensor, saved: Tensor, d_input: Tensor):
        i, self.f, new, o = saved.chunk(4, 2)
        squashed = cells[1:].tanh()
        self.of_cell = o * (1 - squashed.square())
        self.of_output = squashed * o * (1 - o)
        of_gates = [new * i * (1 - i), cells[:-1] * self.f * (1 - self.f), i * (1 - new.square())]
        self.of_gates = torch.stack(of_gates, 2)  # [T, m, 3, H]
        self.d_input = self.d_steps = d_input

    def step(self, t: int, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        m, H = dh.shape
        dc = dh * self.of_cell[t] if dc is None else torch.addcmul(dc, dh, self.of_cell[t])
        d = self.d_input[t]
        torch.mul(self.of_gates[t], dc[:, None], out=d[:, : 3 * H].view(m, 3, H))
        torch.mul(dh, self.of_output[t], out=d[:, 3 * H :])
        return d, None, dc * self.f[t]


class _RNN:
    """h' = tanh(a + p) or relu(a + p)."""

    def __init__(self, kind: str, hidden: Tensor, cells: Tensor, saved: Tensor, d_input: Tensor):
        after = hidden[1:]
        self.slope = 1 - after.square() if kind == "RNN_TANH" else (after > 0).to(after.dtype)
        self.d_input = self.d_steps = d_input

    def step(self, t: int, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return torch.mul(dh, self.slope[t], out=self.d_input[t]), None, None


def _multiple(width: int) -> int:
    return width + -width % ALIGNMENT


def _aligned(rows: Tensor) -> Tensor:
    """Rows padded with zeros to a multiple of 16 columns, so that a product rounds them alike at every position."""
    missing = -rows.shape[1] % ALIGNMENT
    return pad(rows, (0, missing)) if missing else rows


def run_recurrent(tape: Tape, layer: Recurrent, x: Tensor, h0: Tensor | None, c0: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs and last states of records x [n, rows, T, in]: [n, rows, T, out], [n, layers, rows, H] (and cells)."""
    n, rows = x.shape[:2]
    H, directions = layer.hidden_size, 2 if layer.bidirectional else 1
    zero = x.new_zeros(n * rows, H)
    states: list[Tensor] = []
    cells: list[Tensor] = []
    for level in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            nth = level * directions + direction
            name = f"l{level}{'_reverse' if direction else ''}"
            h = zero if h0 is None else h0[:, nth].reshape(n * rows, H)
            c = zero if c0 is None else c0[:, nth].reshape(n * rows, H)
            out, last, cell = _run_direction(tape, layer, name, x.flip(2) if direction else x, h, c)
            outputs.append(out.flip(2) if direction else out)
            states.append(last.reshape(n, rows, H))
            cells.append(cell.reshape(n, rows, H) if isinstance(layer, nn.LSTM) else cell)
        x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
    found = [x, torch.stack(states, 1)]
    return (*found, torch.stack(cells, 1)) if isinstance(layer, nn.LSTM) else tuple(found)


def _run_direction(
    tape: Tape, layer: Recurrent, name: str, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n, rows, T, _ = x.shape
    H = layer.hidden_size
    parameters = [getattr(layer, f"{kind}_{name}", None) for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]
    w_in, b_in, w, b = cast(tuple[Tensor, Tensor | None, Tensor, Tensor | None], tuple(parameters))
    g = run_linear(tape, w_in, b_in, x)
    g = g.view(n * rows, T, -1).transpose(0, 1).contiguous()
    missing = -len(w) % ALIGNMENT
    weight = _aligned(pad(w.detach(), (0, 0, 0, missing)))
    bias = weight.new_zeros(len(weight)) if b is None else pad(b.detach(), (0, missing))
    steps = weight.new_zeros(()).expand_as(g)

    def formula(delta: Tensor) -> list[tuple[Tensor, Gradient]]:
        delta = delta.view(T, n, rows, -1).permute(1, 2, 0, 3).reshape(n, rows * T, -1)
        a = hidden.detach()[:-1].view(T, n, rows, H).permute(1, 2, 0, 3).reshape(n, rows * T, H)
        parts: list[tuple[Tensor, Gradient]] = [(w, Products(delta, a))]
        return parts if b is None else [*parts, (b, Rows(delta.sum(1)))]

    marked = tape.record(steps, [], [w, b], formula)
    hidden, cells = _Recurrence.apply(layer.mode, g, marked, weight, bias, h, c)  # type: ignore[no-untyped-call]
    out = hidden[1:].view(T, n, rows, H).permute(1, 2, 0, 3)
    return out, hidden[T], cells[T] if isinstance(layer, nn.LSTM) else cells
