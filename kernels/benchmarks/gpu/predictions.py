"""What the static models (gpu_model.py, mode_model.py) predict for the rows that are timed."""

from functools import cached_property
from typing import NamedTuple

from gpu_model import DEVICES, Device, attention_work, layer_work, model_seconds, predict
from mode_model import list_seconds, low_rank_seconds, proposal_seconds
from sass import KernelReport
from static_counts import static_counts

from .models import PEER, Spec, positions_of
from .operators import ATTENTION, list_length, shape_of
from .scope import Scope


class Predicted(NamedTuple):
    """Seconds of a forward and of a step, and what limits the slower part of it."""

    forward: float
    step: float
    limit: str

    def row(self) -> dict:
        return {
            "predicted_forward_ms": 1e3 * self.forward,
            "predicted_step_ms": 1e3 * self.step,
            "predicted_limit": self.limit,
        }


def find_device(name: str) -> Device | None:
    """Returns the rates of a GPU by what its driver calls it: "NVIDIA H200" -> H200; None where nobody wrote them
    down."""
    return next((device for device in DEVICES if device.name.lower() in name.lower()), None)


class Predictions:
    """Predictions for one GPU."""

    def __init__(self, device: Device, scope: Scope):
        self.device, self.scope = device, scope

    @cached_property
    def counts(self) -> dict:
        return static_counts(self.device.arch)

    @cached_property
    def kernels(self) -> dict[str, KernelReport]:
        return {name: KernelReport(**report) for name, report in self.counts["exact"].items()}

    def operator(self, mode: str, heads: int, n: int) -> Predicted:
        shape = shape_of(self.scope, heads, n)
        return self._layer(mode, heads, n, shape.batch, has_own_positions=False)

    def _layer(self, mode: str, heads: int, n: int, batch: int, has_own_positions: bool) -> Predicted:
        """Returns the sums of one layer; a step is forward and backward."""
        if mode in ("exact", ATTENTION):
            work = attention_work(heads, n, batch)
            if mode == "exact":
                work = layer_work(self.kernels, heads, n, batch, not has_own_positions)
            forward, backward = (predict(work[kind], self.device, 1) for kind in ("forward", "backward"))
        elif mode.startswith("low rank"):
            forward, backward = low_rank_seconds(self.device, heads, n, batch)
        else:
            length, is_own = list_length(self.scope, mode, n), mode == "Monte Carlo" or has_own_positions
            forward, backward = list_seconds(self.counts, self.device, heads, n, batch, length, is_own)
        return Predicted(forward.seconds, forward.seconds + backward.seconds, backward.limit)

    def model(self, given: Spec) -> Predicted:
        """Returns the sums of all layers and the dense products; neither other layers nor the optimiser nor the
        host."""
        scope, size = self.scope, given.size
        n, batch = positions_of(scope, given.modality), scope.batch
        names = {
            "near_far": ("near field", "low rank"),
            "low_rank": ("low rank",),
            "monte_carlo": ("Monte Carlo",),
            PEER: (ATTENTION,),
        }.get(given.mode, ("exact",))
        has_own_positions = given.modality != "image"
        parts = [self._layer(name, size.heads, n, batch, has_own_positions) for name in names]
        forward, step = (sum(part[k] for part in parts) for k in range(2))
        if given.mode == "monte_carlo":
            step += proposal_seconds(self.device, n, batch)
        dense = [
            model_seconds(seconds, self.device, size.layers, size.width, n, batch, is_step)
            for seconds, is_step in ((forward, False), (step, True))
        ]
        slowest = max(parts, key=lambda part: part.step)
        is_dense = dense[1] > 2 * size.layers * step
        return Predicted(*dense, "dense products" if is_dense else slowest.limit)
