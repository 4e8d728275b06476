"""The family of caches: a causal model that reads in pieces, and takes back, swaps and copies what it has read."""

from copy import deepcopy

import torch
from torch import Tensor

from modeling_itnet import ITNetCache, ITNetConfig, ITNetModel

from .case import Draw, Outcome, allowed
from .modules import SINGLE, VOCABULARY, draw_config, draw_model
from .network import Network

# Of the largest value: what sums in another order may differ by in float64.
ORDER = 1e-10


class Reader:
    """A model with a cache, and all that it has read beside it: tokens, segments and which are real, [3, B, n]."""

    def __init__(self, draw: Draw, model: ITNetModel, spare: int, batch: int):
        self.draw, self.model = draw, model
        self.cache = ITNetCache(model.config, spare=spare)
        self.text = torch.zeros(3, batch, 0, dtype=torch.long)

    def read(self, count: int, padding: float) -> Tensor:
        """New tokens, some of them padding: their states [B, count, d]."""
        batch = self.text.shape[1]
        real = (self.draw.uniform(batch, count) >= padding).long()
        new = torch.stack(
            [self.draw.integers(1, VOCABULARY, batch, count), self.draw.integers(0, 2, batch, count), real]
        )
        self.text = torch.cat([self.text, new], 2)
        mask = self.text[2] if self.draw.chance("whole mask", 0.5) else real
        mask = None if padding == 0 and self.draw.chance("no mask", 0.5) else mask
        given = {"input_ids": new[0], "token_type_ids": new[1], "attention_mask": mask}
        return self.model(**given, past_key_values=self.cache).last_hidden_state

    def take_back(self, count: int) -> None:
        self.cache.crop(-count)
        self.text = self.text[..., : self.text.shape[2] - count]

    def reorder(self, samples: Tensor) -> None:
        self.cache.reorder_cache(samples)
        self.text = self.text[:, samples]

    def continued_elsewhere(self) -> None:
        """A copy reads on, which must leave no trace."""
        other = deepcopy(self.cache)
        ids = self.draw.integers(1, VOCABULARY, self.text.shape[1], 2)
        self.model(ids, past_key_values=other)
        other.crop(-min(other.spare, 1))

    @property
    def inputs(self) -> dict[str, Tensor]:
        return dict(zip(("input_ids", "token_type_ids", "attention_mask"), self.text, strict=True))


def draw_causal(draw: Draw) -> ITNetConfig:
    mode = draw.choice("integration", ("exact", "near_far", "near_far", "low_rank", "low_rank", "monte_carlo"))
    settings = {"integration_mode": mode, "num_samples": draw.integer("samples", 1, 4), "is_causal": True}
    settings["factor_decay"] = mode in ("near_far", "low_rank") and draw.chance("decay", 0.5)
    settings["near_size"] = draw.choice("window", (1, 2, 3, 6))
    return draw_config(draw, "text", **settings)


@torch.no_grad()
def caches(draw: Draw, outcome: Outcome) -> None:
    """After every step, new tokens are what one call on the whole text says, and at last what the oracle says."""
    config = draw_causal(draw)
    model = draw_model(draw, config)
    spare, batch = draw.choice("spare", (0, 1, 2, 5, 64)), draw.integer("batch", 1, 3)
    padding = draw.choice("padding", (0.0, 0.0, 0.2, 0.7))
    reader = Reader(draw, model, spare, batch)
    for step in range(draw.integer("steps", 2, 6)):
        count = draw.choice(f"tokens {step}", (1, 1, 1, 2, 5, 9))
        states = reader.read(count, padding)
        compare(outcome, f"step {step}", reader, model, states)
        length = reader.text.shape[2]
        what = draw.choice(f"then {step}", ("nothing", "crop", "crop", "reorder", "copy"))
        if what == "crop":
            reader.take_back(draw.integer(f"taken back {step}", 0, min(spare, length)))
        elif what == "reorder":
            reader.reorder(draw.integers(0, reader.text.shape[1], draw.integer(f"samples {step}", 1, 3)))
        elif what == "copy":
            reader.continued_elsewhere()
    count = draw.integer("last tokens", 1, 4)
    states = reader.read(count, 0.0)
    compare(outcome, "the end", reader, model, states)
    if config.integration_mode == "monte_carlo":  # anchors are not the oracle's
        return
    wanted = allowed(lambda r: Network(config, model.state_dict(), r).forward(reader.inputs), SINGLE, SINGLE)["states"]
    outcome.compare("oracle", states, wanted.exact[:, -count:], wanted.computed)


def compare(outcome: Outcome, name: str, reader: Reader, model: ITNetModel, states: Tensor) -> None:
    """The states of new real tokens against those of the whole text in one call, by texts that have any."""
    count, inputs = states.shape[1], reader.inputs
    some = inputs["attention_mask"].any(1)
    if not some.any():
        return
    whole = model(**{key: value[some] for key, value in inputs.items()}, use_cache=False).last_hidden_state
    real = inputs["attention_mask"][some, -count:].bool()
    tolerance = ORDER * max(1.0, float(whole.abs().max()))
    outcome.compare(name, states[some][real], whole[:, -count:][real], tolerance)
