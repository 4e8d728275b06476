"""The gradients of the sum over pairs, in the tiles of tiled.py, whose pre-activations are computed again."""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import gelu

from .pair_inputs import HEAD_MAJOR
from .tiled import Cells, PairTiles, Place, accumulate, of_cells, store, weigh

_gelu = torch.ops.aten.gelu.out
_gelu_backward = torch.ops.aten.gelu_backward.grad_input


class TiledBackward(PairTiles):
    """One evaluation of the gradients of the pair sum. README.md derives them."""

    def backward(self, grad_out: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Returns the gradients of the named arguments, and perhaps of others, in their layout."""
        if "measure" in names:
            self.measure, self.scale = self.inputs.omega[None, :, :, None], 1.0
        upstream = (grad_out.permute(2, 0, 1, 3) * self.scale).contiguous()  # [H, B, n_q, d_h]
        grads = self.inputs.zeros(name for name in names if name not in HEAD_MAJOR)
        grads |= {name: self.keys.new_zeros(getattr(self, name).shape) for name in HEAD_MAJOR}
        for cells, place in self._places():
            bias = grad_bias = None
            if self.bias is not None:
                bias = self.bias.tile(cells, place)
                grad_bias = torch.zeros_like(bias)
            for heads, part in self._groups(place):
                own = (self._of(tensor, place, part) for tensor in (bias, grad_bias))
                self._group_backward(cells, heads, part, cells.take(upstream, "queries", heads, part), *own, grads)
            if self.inputs.has_position_bias:
                self.bias.backward(cells, place, grad_bias, grads)
        return grads | {name: grads[name].permute(1, 2, 0, 3) for name in HEAD_MAJOR}

    def _group_backward(self, cells, heads: slice, part: Place, upstream: Tensor, bias, grad_bias, grads) -> None:
        omega, shape = self._omega(cells, part), self._shape(heads, part)
        by_head = upstream.flatten(1, 2)  # [h, c * t, d_h]
        grad_moments = self._buffer("grad_moments", *by_head.shape[:2], self.inputs.w2.shape[1])
        torch.bmm(by_head, self.inputs.w2[heads].mT, out=grad_moments)
        grad_moments = grad_moments.view(*shape, self.head_dim)  # dA [h, c, t * w, d_h]
        moments = self._buffer("moments", *grad_moments.shape)  # A, again, for the gradient of W2
        grad_row = self._buffer("grad_row", *shape[:2], 1, shape[2])  # dq
        grad_virtual = self._buffer("grad_virtual", *grad_moments.shape)  # dQ, where there is content
        grad_keys = self._buffer("grad_keys", *shape[:2], cells.num_keys, self.head_dim)  # as keys and as values
        grad_keys[:, :, self._end(cells, part) :] = 0
        is_by_keys = self._is_by_keys(cells, part)
        grad_measure = torch.zeros_like(omega) if "measure" in grads else None  # [c, n_k, 1]
        for tile in self._tiles(cells, heads, part, bias):
            chunk, columns, value, virtual, pre, early = tile
            outer = grad_moments[chunk]
            grad = self._buffer("grad", *pre.shape)  # dL/dh / omega, then dL/dpre in place: [h, c, m, t * w]
            store(grad, value, outer.mT)
            hidden = _gelu(pre, out=self._buffer("hidden", *pre.shape))
            hidden = self._with_constant(hidden, tile, cells, part)
            if grad_measure is not None:
                grad_measure[chunk[1], columns, 0] += (hidden * grad).sum((0, 3))
            weigh(hidden, omega, tile)
            total = grad_keys[chunk][:, :, columns]
            if is_by_keys:
                own_heads = slice(heads.start + chunk[0].start, heads.start + chunk[0].stop)
                self._value_backward(hidden, upstream[chunk], value, own_heads, total, grads["w2"])
            else:
                accumulate(moments[chunk], hidden.mT, value, columns)
                store(total, hidden, outer)
            _gelu_backward(grad, pre, approximate="none", grad_input=grad)
            weigh(grad, omega, tile)
            if early is not None:
                grad = self._mix_backward(grad, early, grads)
            sums = grad.sum(2, keepdim=True)
            grad_row[chunk] = sums if columns.start == 0 else grad_row[chunk] + sums
            if virtual is not None:
                accumulate(grad_virtual[chunk], grad.mT, value, columns)
                store(total, grad, virtual, beta=1)
            if grad_bias is not None:
                own = of_cells(grad_bias, part.num_cells, chunk[1])[:, columns]
                for one in grad.unflatten(1, (-1, len(own))).flatten(0, 1):  # one head of one sample after the other
                    own += one
        if not is_by_keys:
            grads["w2"][heads].baddbmm_(self._by_head(moments).mT, by_head)
        cells.add(grads["row"], "queries", heads, part, grad_row.view(*upstream.shape[:3], -1))
        cells.add(grads["keys"], "keys", heads, part, grad_keys)
        if grad_measure is not None:
            cells.add(grads["measure"][None, :, :, None], "keys", slice(None), part, grad_measure[None])
        if self.has_content:
            self._virtual_backward(cells, heads, part, grad_virtual.unflatten(2, (-1, self.width)), grads)

    def _is_by_keys(self, cells: Cells, part: Place) -> bool:
        """Says whether :meth:`_value_backward` is faster: it saves a product over the pairs, t m w d_h multiply-adds,
        and has 2 m w d_h^2 for keys in place of t w d_h^2 for queries; it needs half as much again to be worth it."""
        saved = part.num_queries * (cells.num_keys + self.head_dim)
        return cells.pairs is None and saved > 3 * cells.num_keys * self.head_dim

    def _value_backward(self, hidden: Tensor, upstream: Tensor, value: Tensor, heads: slice, total, grad_w2) -> None:
        """Computes the gradients of W2 and of the keys as values, through V_j[k, a] = omega_j sum_i h_ij[k] g_i[a].

        Both are sums over the keys alone then, so that neither A nor h dA is a sum over the pairs. ``total`` [h, c, m,
        d_h] is overwritten, and ``grad_w2`` of all heads added to.
        """
        hidden = hidden.unflatten(3, (-1, self.width)).mT  # [h, c, m, w, t]
        received = self._buffer("received", *hidden.shape[:4], self.head_dim)  # V
        for cell in itertools.product(*map(range, hidden.shape[:2])):
            torch.bmm(hidden[cell], upstream[cell].expand(hidden.shape[2], -1, -1), out=received[cell])
        w2 = self.inputs.w2[heads].unflatten(1, (self.width, -1)).mT.flatten(1, 2)  # [h, w * d_h, d_h], rows (k, a)
        store(total, received.flatten(3), w2.unsqueeze(1).expand(-1, hidden.shape[1], -1, -1))
        for own, values, sums in zip(grad_w2[heads], value, received, strict=True):
            by_unit = sums.flatten(0, 1).transpose(0, 1)  # [w, c * m, d_h]
            own.unflatten(0, (self.width, -1)).baddbmm_(values.flatten(0, 1).T.expand(self.width, -1, -1), by_unit)

    def _virtual_backward(self, cells, heads, part, grad_virtual: Tensor, grads: dict[str, Tensor]) -> None:
        """Takes dL/dQ_i[k] [h, c, t, w, d_h], which is overwritten, to the query features, W_uy and W_had."""
        inputs = self.inputs
        if inputs.w_key is not None:
            grads["w_key"] += grad_virtual.sum((0, 1, 2))
        if inputs.w_product is not None:
            # Not einsum: it would make a batch of d_h matrix-vector products of these.
            queries = cells.take(self.queries, "queries", heads, part).unsqueeze(-2)
            product = self._buffer("moments", *grad_virtual.shape)  # A is not needed any more
            grad_queries = torch.mul(grad_virtual, inputs.w_product, out=product).sum(-2)
            cells.add(grads["queries"], "queries", heads, part, grad_queries)
            grads["w_product"] += grad_virtual.mul_(queries).sum((0, 1, 2))

    def _mix_backward(self, grad: Tensor, early: Tensor, grads: dict[str, Tensor]) -> Tensor:
        """Goes back through W_mid GELU(early) + b_mid: turns dL/d(second pre-activation) into dL/d(first)."""
        hidden, grad = (tensor.view(-1, self.width) for tensor in (gelu(early), grad))  # [pairs, w]
        grads["b_mid"] += grad.sum(0)
        grads["w_mid"] += grad.T @ hidden
        grad = (grad @ self.inputs.w_mid).view(early.shape)
        return _gelu_backward(grad, early, approximate="none", grad_input=grad)
