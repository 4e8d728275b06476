r"""The sum over the last s keys of every query, for evenly spaced positions: what a causal text has as its near field.

    out_i[a]    = sum_{e<s} sum_k GELU(pre_ie[k]) z_(i-e)[k, a] + sum_{e<s} sum_c b2[c, a] v_(i-e)[c]
    pre_ie[k]   = row_i[k] + column_(i-e)[k] + table_e[k] + sum_c W_had[k, c] u_i[c] u_(i-e)[c]
    z_j[k, a]   = sum_c W2[(k, c), a] v_j[c],      v_j = omega_j u_j

Where all windows look alike, nothing has to be gathered: a window is a view of neighbouring rows. What belongs to the
pairs is [rows, s, w], without a pair that does not count; W_had meets all products u_i u_j in one matrix product, and
W2 meets keys instead of pairs. The sum over the pairs is then one product per block of t queries, [t, m w] x
[m w, d_h], with the m = t + s - 1 keys of the block and hidden units that are 0 outside of a band. Positions before
the first have v = 0 and count for nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad

from ..operators import plain_gradients
from ..transforms import is_transformed, needs_graph

# Queries of a block.
_BLOCK = 4
# Elements of z at a time: 4 MB in float32.
_CHUNK_ELEMENTS = 2**20

_gelu = torch.ops.aten.gelu.out
_gelu_backward = torch.ops.aten.gelu_backward.grad_input


class WindowInputs(NamedTuple):
    """Arguments of the sum."""

    queries: Tensor  # u [B, n, H, d_h]
    row: Tensor  # [B, n, H, w]
    column: Tensor  # [B, n, H, w]
    values: Tensor  # v [B, n, H, d_h]
    table: Tensor  # [s, w], the row of e = s - 1 first
    w_product: Tensor | None  # W_had [w, d_h]
    w2: Tensor  # [H, w * d_h, d_h], rows (k, c), columns a
    b2: Tensor  # [H, d_h, d_h], rows c, columns a


def window_sum(inputs: WindowInputs) -> Tensor:
    """Returns the sum above, [B, n, H, d_h], which is differentiable in everything, to any order."""
    return plain_window_sum(inputs) if is_transformed() else _WindowSum.apply(*inputs)


def plain_window_sum(inputs: WindowInputs) -> Tensor:
    """Does the same in ordinary PyTorch operations, which keep n s w d_h numbers for a gradient."""
    queries, row, column, values, table, w_product, w2, b2 = inputs
    size = len(table)

    def windows(rows: Tensor) -> Tensor:
        return pad(rows, (0, 0, 0, 0, size - 1, 0)).unfold(1, size, 1).movedim(-1, 2)  # [B, n, s, H, f]

    pre, values = row.unsqueeze(2) + windows(column) + table[:, None], windows(values)
    if w_product is not None:
        pre = pre + (queries.unsqueeze(2) * windows(queries)) @ w_product.T
    moments = torch.einsum("bnshk,bnshc->bnhkc", gelu(pre), values).flatten(3)
    return torch.einsum("bnhx,hxa->bnha", moments, w2) + torch.einsum("bnhc,hca->bnha", values.sum(2), b2)


class _WindowSum(torch.autograd.Function):
    """Keeps its arguments only: the backward computes the rest again."""

    @staticmethod
    def forward(ctx, *arguments: Tensor | None) -> Tensor:
        ctx.save_for_backward(*arguments)
        return _Windows(*arguments).forward()

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = WindowInputs(*ctx.saved_tensors)
        if not needs_graph(grad_out):
            with torch.autocast(grad_out.device.type, enabled=False):  # a caller may still be inside of it
                return _Windows(*inputs).backward(grad_out)
        names = [name for name, needed in zip(inputs._fields, ctx.needs_input_grad, strict=True) if needed]
        grads = plain_gradients(plain_window_sum, inputs, names, grad_out)
        return tuple(grads.get(name) for name in inputs._fields)


class _Windows:
    """One evaluation, part by part: some rows of some samples of one head.

    Rows are [H, B, p + n + rest, f], after p >= s - 1 rows of 0. A part has L rows of each of its samples, one sample
    after the other, of which the first p are keys only: as queries they belong to the part before, or to nothing. In
    the comments, R counts the rows of a part.
    """

    def __init__(self, queries, row, column, values, table, w_product, w2, b2):
        self.table, self.w_product, self.w2, self.b2 = table, w_product, w2, b2
        self.size, self.width = table.shape
        self.batch, self.count, self.num_heads, self.head_dim = queries.shape
        self.keys = _BLOCK + self.size - 1  # m
        rows = max(self.size, _CHUNK_ELEMENTS // (self.width * self.head_dim))
        self.own = min(self.count, rows)  # queries of a sample in a part
        self.before = self.size - 1 + -(self.own + self.size - 1) % _BLOCK  # p
        self.length = self.before + self.own  # L
        self.samples = max(1, rows // self.length)
        self.pads = 0, 0, self.before, -self.count % self.own
        self.rows = [pad(part.permute(2, 0, 1, 3), self.pads) for part in (queries, row, column, values)]
        self._buffers: dict[tuple, Tensor] = {}

    def forward(self) -> Tensor:
        """Returns the sums [B, n, H, d_h]."""
        out = torch.empty_like(self.rows[0])
        for head, samples, rows in self._parts():
            _, values, pre, _ = self._pre_activations(head, samples, rows)
            hidden = self._by_blocks(gelu(pre))
            part = torch.bmm(hidden, self._received(head, values))  # [R / t, t, d_h]
            part = part.view(-1, self.head_dim).addmm_(self._windows(values).sum(1), self.b2[head])
            own = slice(rows.start + self.before, rows.stop)
            out[head, samples, own] = part.view(-1, self.length, self.head_dim)[:, self.before :]
        return self._of_positions(out)

    def backward(self, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of all arguments."""
        size, width, head_dim = self.size, self.width, self.head_dim
        grads = [torch.zeros_like(part) for part in self.rows]
        grad_table, grad_w2, grad_b2 = (torch.zeros_like(tensor) for tensor in (self.table, self.w2, self.b2))
        grad_product = None if self.w_product is None else torch.zeros_like(self.w_product)
        grad_out = pad(grad_out.permute(2, 0, 1, 3), self.pads)
        for head, samples, rows in self._parts():
            queries, values, pre, products = self._pre_activations(head, samples, rows)
            count = len(pre)  # R
            upstream = self._upstream(grad_out[head, samples, rows])  # g [R + s - 1, d_h]
            # [R / t, m * w, t]: libraries multiply the view z as such, but copy its transpose.
            by_block = upstream[:count].view(-1, _BLOCK, head_dim).mT.contiguous()
            by_key = torch.bmm(self._received(head, values), by_block)
            grad = self._band_of_keys(by_key).reshape(count, size, width)  # a copy: dL/dh, then dL/dpre
            hidden = self._by_keys(_gelu(pre, out=self._buffer("hidden", count, size, width)))
            _gelu_backward(grad, pre, approximate="none", grad_input=grad)
            # dz_j[k] = sum_e h_(j+e),e[k] g_(j+e), by blocks of keys: [R, w * d_h]
            blocks = upstream.as_strided((count // _BLOCK, self.keys, head_dim), (_BLOCK * head_dim, head_dim, 1))
            received = self._buffer("received", count, width * head_dim)
            torch.bmm(hidden, blocks, out=received.view(-1, _BLOCK * width, head_dim))
            sums, own = self._windows(upstream).sum(1), values[size - 1 :]
            grad_b2[head].addmm_(own.T, sums)
            outer = (own.T @ received).view(head_dim, width, head_dim)  # [c, k, a]
            grad_w2[head].view(width, head_dim, head_dim).add_(outer.transpose(0, 1))
            grad_values = torch.mm(received, self._key_weight(head).T).addmm_(sums, self.b2[head].T)
            grad_table += grad.sum(0)
            found = [None, grad.sum(1), self._sums_at_keys(grad), grad_values]
            if products is not None:
                flat = grad.view(-1, width)
                grad_product.addmm_(flat.T, products.view(-1, head_dim))
                by_pair = torch.mm(flat, self.w_product, out=self._buffer("pair", len(flat), head_dim))
                by_pair = by_pair.view(count, size, head_dim)
                found[0] = torch.mul(by_pair, self._windows(queries), out=products).sum(1)
                found[0] += self._sums_at_keys(by_pair.mul_(queries[size - 1 :].unsqueeze(1)))
            for total, part in zip(grads, found, strict=True):
                if part is not None:
                    total[head, samples, rows] += part.view(-1, self.length, part.shape[-1])
        return *map(self._of_positions, grads), grad_table, grad_product, grad_w2, grad_b2

    def _parts(self) -> Iterator[tuple[int, slice, slice]]:
        """Yields head, samples and rows."""
        for head in range(self.num_heads):
            for first in range(0, self.batch, self.samples):
                for start in range(0, self.count, self.own):
                    yield head, slice(first, first + self.samples), slice(start, start + self.length)

    def _pre_activations(self, head: int, samples: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns u and v [s - 1 + R, d_h], pre [R, s, w], and u_i u_j [R, s, d_h] if the kernel sees it."""
        queries, row, column, values = (self._flat(part[head, samples, rows]) for part in self.rows)
        own = slice(self.size - 1, None)
        pre = torch.add(self._windows(column), row[own].unsqueeze(1)).add_(self.table)
        products = None
        if self.w_product is not None:
            products = self._buffer("products", *pre.shape[:2], self.head_dim)
            torch.mul(self._windows(queries), queries[own].unsqueeze(1), out=products)
            pre.view(-1, self.width).addmm_(products.view(-1, self.head_dim), self.w_product.T)
        return queries, values, pre, products

    def _flat(self, part: Tensor) -> Tensor:
        """Returns [samples, L, f] as [s - 1 + R, f]: the first window looks back from the first row."""
        return pad(part.reshape(-1, part.shape[-1]), (0, 0, self.size - 1, 0))

    def _upstream(self, part: Tensor) -> Tensor:
        """Returns [samples, L, f] as [R + s - 1, f], with 0 for the rows that are keys only."""
        upstream = pad(part.reshape(-1, part.shape[-1]), (0, 0, 0, self.size - 1))
        upstream[: part[..., 0].numel()].view(part.shape)[:, : self.before] = 0
        return upstream

    def _windows(self, rows: Tensor) -> Tensor:
        """Returns a view of [s - 1 + R, f] as [R, s, f]."""
        width = rows.shape[1]
        return rows.as_strided((len(rows) - self.size + 1, self.size, width), (width, width, 1))

    def _sums_at_keys(self, pairs: Tensor) -> Tensor:
        """Sums [R, s, f] over the windows that a row is in: [R, f]."""
        total = pairs.new_zeros(len(pairs) + self.size - 1, pairs.shape[2])
        for step in range(self.size):
            total[step : step + len(pairs)] += pairs[:, step]
        return total[self.size - 1 :]

    def _key_weight(self, head: int) -> Tensor:
        """Returns W2 as it meets keys: [d_h, w * d_h], rows c, columns (k, a)."""
        return self.w2[head].view(self.width, self.head_dim, -1).transpose(0, 1).flatten(1)

    def _received(self, head: int, values: Tensor) -> Tensor:
        """Returns a view of z of the keys of every block: [R / t, m * w, d_h]."""
        size = self.width * self.head_dim
        z = torch.mm(values, self._key_weight(head), out=self._buffer("z", len(values), size))
        blocks = (len(values) - self.size + 1) // _BLOCK
        return z.as_strided((blocks, self.keys * self.width, self.head_dim), (_BLOCK * size, self.head_dim, 1))

    def _band(self, blocks: Tensor) -> Tensor:
        """Returns a view of the pairs that count of [R / t, t, m, w]: [R / t, t, s, w]."""
        step = self.keys * self.width
        strides = _BLOCK * step, step + self.width, self.width, 1
        return blocks.as_strided((len(blocks), _BLOCK, self.size, self.width), strides)

    def _band_of_keys(self, blocks: Tensor) -> Tensor:
        """Returns a view of the pairs that count of [R / t, m * w, t]: [R / t, t, s, w]."""
        step = self.width * _BLOCK
        strides = self.keys * step, step + 1, step, _BLOCK
        return blocks.as_strided((len(blocks), _BLOCK, self.size, self.width), strides)

    def _by_blocks(self, hidden: Tensor) -> Tensor:
        """Turns [R, s, w] into [R / t, t, m * w], with 0 for the pairs that do not count."""
        blocks = self._zeros("blocks", len(hidden) // _BLOCK, _BLOCK, self.keys, self.width)
        self._band(blocks).copy_(hidden.view(-1, _BLOCK, self.size, self.width))
        return blocks.flatten(2)

    def _by_keys(self, hidden: Tensor) -> Tensor:
        """Does the same by blocks of keys, [R / t, t * w, m]: key j meets the queries j + e, e < s."""
        count, size, width = len(hidden), self.size, self.width
        by_query = pad(hidden.flatten(1), (0, 0, 0, size - 1))  # [R + s - 1, s * w]
        # Query j + e has this key in column s - 1 - e of its window.
        shape, strides = (
            (count // _BLOCK, _BLOCK, width, size),
            (_BLOCK * size * width, size * width, 1, (size - 1) * width),
        )
        by_key = by_query.as_strided(shape, strides, (size - 1) * width)
        blocks = self._zeros("by keys", count // _BLOCK, _BLOCK, width, self.keys)
        step = width * self.keys
        blocks.as_strided(shape, (_BLOCK * step, step + 1, self.keys, 1)).copy_(by_key)
        return blocks.flatten(1, 2)

    def _buffer(self, name: str, *shape: int) -> Tensor:
        """Returns uninitialised memory that every part uses again: fresh pages would cost as much as a product."""
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = self.table.new_empty(shape)
        return self._buffers[name, shape]

    def _zeros(self, name: str, *shape: int) -> Tensor:
        """Returns the same of zeros, which stay zero outside of the band."""
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = self.table.new_zeros(shape)
        return self._buffers[name, shape]

    def _of_positions(self, rows: Tensor) -> Tensor:
        """Turns [H, B, p + n + rest, f] into [B, n, H, f]."""
        return rows[:, :, self.before : self.before + self.count].permute(1, 2, 0, 3)
