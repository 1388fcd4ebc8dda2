"""Multi-head attention and Transformer encoder layers, built from linear layers that have a formula."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pdsl.gradients.linear import run_linear
from pdsl.gradients.tape import Tape


def run_attention(
    tape: Tape,
    layer: nn.MultiheadAttention,
    same: tuple[bool, bool],
    weights: str,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of records query [n, rows, L, E], key and value [n, rows, S, ...] (None if `same`).

    padding [n, rows, S] and mask [n, L, S] or [n, rows · heads, L, S]: True, or a number that is added to the scores.
    `weights`: "" for the output only, "mean" for attention weights averaged over heads, "each" for all of them.
    """
    n, rows, L, E = query.shape
    heads = layer.num_heads
    q, k, v = _project(tape, layer, same, query, key, value)
    S = k.shape[2]
    q, k, v = (t.reshape(n * rows, -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k, v))
    scores = _scores(n, rows, heads, padding, mask, q)
    if weights:
        products = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
        attention = (products if scores is None else products + scores).softmax(-1)
        out = torch.matmul(attention, v)
    else:
        out = scaled_dot_product_attention(q, k, v, scores)
    out = out.transpose(1, 2).reshape(n, rows, L, E)
    out = run_linear(tape, layer.out_proj.weight, layer.out_proj.bias, out)
    if not weights:
        return out
    attention = attention.view(n, rows, heads, L, S)
    return out, attention.mean(2) if weights == "mean" else attention


def _project(
    tape: Tape,
    layer: nn.MultiheadAttention,
    same: tuple[bool, bool],
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values. Of equal inputs, all are one product."""
    E, bias = layer.embed_dim, layer.in_proj_bias
    key = query if key is None else key
    value = key if value is None else value
    if not layer._qkv_same_embed_dim:
        # the weights have different widths; the bias is one parameter
        inputs = zip((layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight), (query, key, value), strict=True)
        return tuple(run_linear(tape, w, bias, x, part=(i * E, E)) for i, (w, x) in enumerate(inputs))  # type: ignore[return-value]
    if all(same):
        q, k, v = run_linear(tape, layer.in_proj_weight, bias, query).chunk(3, -1)
        return q, k, v
    project = partial(run_linear, tape, layer.in_proj_weight, bias)
    if same[1]:
        k, v = project(key, part=(E, 2 * E)).chunk(2, -1)
        return project(query, part=(0, E)), k, v
    return project(query, part=(0, E)), project(key, part=(E, E)), project(value, part=(2 * E, E))


def _scores(n: int, rows: int, heads: int, padding: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Numbers to add to the scores: [n · rows, heads or 1, L or 1, S]."""
    total = None
    if padding is not None:
        total = _additive(padding, q).reshape(n * rows, 1, 1, -1)
    if mask is not None:
        added = _additive(mask, q)
        L, S = added.shape[-2:]
        if added.ndim == 4:
            added = added.reshape(n * rows, heads, L, S)
        else:
            added = added[:, None].expand(n, rows, L, S).reshape(n * rows, 1, L, S)
        total = added if total is None else total + added
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, float("-inf"))
    return mask.to(like.dtype)


def attention(tape: Tape, layer: nn.MultiheadAttention) -> Callable[..., object]:
    if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
        raise NotImplementedError
    inside_vmap = tape.one_record_at_a_time

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        same = (key is query, value is key)
        weights = "" if not need_weights else "mean" if average_attn_weights else "each"
        alone = query.ndim == 2 if inside_vmap else query.ndim == 3  # a record without a batch dimension of its own
        if not inside_vmap and (not alone or not layer.batch_first):
            raise RuntimeError("attention over the records")

        def run(
            query: Tensor, key: Tensor | None, value: Tensor | None, padding: Tensor | None, mask: Tensor | None
        ) -> Tensor | tuple[Tensor, ...]:
            key, value = (t if t is None else _rows_first(t, alone, layer.batch_first) for t in (key, value))
            if padding is not None and alone:
                padding = padding[:, None]
            found = run_attention(
                tape, layer, same, weights, _rows_first(query, alone, layer.batch_first), key, value, padding, mask
            )
            out, attended = (found, None) if isinstance(found, Tensor) else found
            out = out[:, 0] if alone else out if layer.batch_first else out.transpose(1, 2)
            if attended is None:
                return out
            return out, attended[:, 0] if alone else attended

        found = tape.enter(
            run, query, None if same[0] else key, None if same[1] else value, key_padding_mask, attn_mask
        )
        return (found, None) if isinstance(found, Tensor) else (found[0], found[1])

    return forward


def _rows_first(t: Tensor, alone: bool, batch_first: bool) -> Tensor:
    """Sequences as [n, rows, T, ...]."""
    return t[:, None] if alone else t if batch_first else t.transpose(1, 2)


def encoder_layer(tape: Tape, layer: nn.TransformerEncoderLayer) -> Callable[..., object]:
    """The layer without torch's fused path, which computes no gradients and skips the layers inside."""

    def forward(
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return layer.self_attn(  # type: ignore[no-any-return]
                x, x, x, attn_mask=src_mask, key_padding_mask=src_key_padding_mask, need_weights=False
            )[0]

        def feed(x: Tensor) -> Tensor:
            return layer.linear2(layer.activation(layer.linear1(x)))  # type: ignore[no-any-return]

        if layer.norm_first:
            x = src + attend(layer.norm1(src))
            return x + feed(layer.norm2(x))
        x = layer.norm1(src + attend(src))
        return layer.norm2(x + feed(x))  # type: ignore[no-any-return]

    return forward
