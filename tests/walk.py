"""Counts the functions and files that a reader has to follow one batch of images through.

    python tests/walk.py                # this repository
    python tests/walk.py ../elsewhere   # another checkout, of any commit

It runs `examples/run_image_classification.py` with the tiny preset on sixteen images of 32 x 32 pixels and takes the
place of `Trainer.train`: it gives eight rows to the trainer's collator, and what comes back to its `compute_loss`.

A *frame* is a function of the project (the three packages and examples/) that the batch passes through and that
returns something, or makes an object: checks, which return nothing, are no frames. A function counts once, and
comprehensions belong to the function around them. The walk has three parts:

- the collator: every function that is entered, because all that it returns is a part of the batch;
- the model up to the first GEMM, the first matrix product whose two factors both depend on the batch (queries with
  keys): every function on the call stack while torch computes a tensor from one that depends on the batch. Functions
  that only look at shapes, weights or positions are no frames: a reader who follows the batch may skip them;
- back to the loss: the same, for what torch computes after the first GEMM outside of the layers.
"""

import argparse
import contextlib
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pictures
from torch.overrides import TorchFunctionMode

PACKAGES = ("modeling_itnet", "configuration", "kernels", "examples")
GEMMS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "baddbmm_", "einsum"}
# Functions whose result depends on the shape, dtype and device of a tensor only.
FACTORIES = {f"new_{kind}" for kind in ("empty", "full", "ones", "zeros", "tensor")}
FACTORIES |= {f"{kind}_like" for kind in ("empty", "full", "ones", "zeros", "rand", "randn")}
ROWS, BATCH = 16, 8


def tensors_in(value) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


class Walk(TorchFunctionMode):
    """Sees every function of torch that Python calls, and notes the functions that the batch passes through."""

    def __init__(self, root: Path):
        super().__init__()
        self.folders = tuple(str(root / name) for name in PACKAGES)
        self.root = root
        self.outermost = None  # the stack frame that calls the collator and the model, once the walk has begun
        self.part = "collator"
        self.returning: set[tuple[str, str]] = set()  # functions that returned something
        self.frames: dict[tuple[str, str], str] = {}  # (file, function) -> part, in the order of the walk
        self.batch: dict[int, torch.Tensor] = {}  # address of the memory -> a tensor that keeps it from being reused

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        result = function(*args, **kwargs)
        made = list(tensors_in(result))
        if name in FACTORIES or (not made and name != "__setitem__"):  # .shape, .dim() and the like give no tensor
            return result
        given = list(tensors_in([args, kwargs]))
        of_batch = [tensor for tensor in given if self._holds(tensor)]
        if of_batch:
            for tensor in [*made, *given[:1]] if name == "__setitem__" else made:
                self.keep(tensor)
            self._note(sys._getframe(1))
        if self.part == "to the first GEMM" and name in GEMMS and len(of_batch) >= 2:
            self.part = "back to the loss"
        return result

    def _address(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def _holds(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and self._address(tensor) in self.batch

    def keep(self, tensor: torch.Tensor) -> None:
        self.batch[self._address(tensor)] = tensor

    def note_call(self, frame, event, argument) -> None:
        """For `sys.setprofile`; ``argument`` is what a function returns."""
        if event not in ("call", "return"):
            return
        key = self._function(frame)
        if key is not None and event == "call" and self.part == "collator":
            self.frames.setdefault(key, self.part)
        if key is not None and event == "return" and (argument is not None or key[1].endswith(".__init__")):
            self.returning.add(key)

    def _note(self, frame) -> None:
        """Adds the project's functions on the stack, the outermost first."""
        stack = []
        while frame is not None and frame is not self.outermost:
            stack.append(self._function(frame))
            frame = frame.f_back
        stack = [key for key in reversed(stack) if key is not None]
        if self.part == "back to the loss" and any(file.endswith("/layers.py") for file, _ in stack):
            return
        for key in stack:
            self.frames.setdefault(key, self.part)

    def _function(self, frame) -> tuple[str, str] | None:
        """(file, function) of the project."""
        code = frame.f_code
        if not code.co_filename.startswith(self.folders):
            return None
        function = code.co_qualname
        while function.endswith(">") and not function.endswith("<lambda>") and ".<locals>." in function:
            function = function.rpartition(".<locals>.")[0]  # a comprehension
        return Path(code.co_filename).relative_to(self.root).as_posix(), function


@contextlib.contextmanager
def _inside_custom_operators(walk: Walk):
    """Torch switches a mode off while it sees a function, and with it what a custom operator calls: on again there."""
    original = torch.library.custom_op

    def custom_op(name, function=None, /, **options):
        def decorate(function):
            @functools.wraps(function)
            def seen(*args, **kwargs):
                with walk if walk.outermost is not None else contextlib.nullcontext():
                    return function(*args, **kwargs)

            return original(name, seen, **options)

        return decorate if function is None else decorate(function)

    torch.library.custom_op = custom_op
    try:
        yield
    finally:
        torch.library.custom_op = original


class _Walked(Exception):
    """Leaves the script when the loss is there."""


@contextlib.contextmanager
def _in_place_of_training(walk: Walk):
    def train(trainer, *args, **kwargs):
        rows = [trainer.train_dataset[index] for index in range(BATCH)]
        trainer.model.train()
        walk.outermost = sys._getframe()
        sys.setprofile(walk.note_call)
        try:
            batch = trainer.data_collator(rows)
            for tensor in tensors_in(dict(batch)):
                walk.keep(tensor)
            walk.part = "to the first GEMM"
            with walk:
                loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(BATCH))
        finally:
            sys.setprofile(None)
        assert loss.isfinite() and walk.part == "back to the loss"
        raise _Walked

    before, transformers.Trainer.train = transformers.Trainer.train, train
    try:
        yield
    except _Walked:
        pass
    finally:
        transformers.Trainer.train = before


def _write_data(folder: Path) -> None:
    pixels = np.arange(32 * 32 * 3).reshape(32, 32, 3)
    images = [Pictures.fromarray((pixels * (index + 1) % 256).astype(np.uint8)) for index in range(ROWS)]
    columns = {"image": images, "label": [index % 2 for index in range(ROWS)]}
    features = Features({"image": Image(), "label": ClassLabel(names=["even", "odd"])})
    for split in ("train", "test"):
        Dataset.from_dict(columns, features=features).to_parquet(str(folder / f"{split}.parquet"))


def walk_of_a_batch(root: Path) -> dict[tuple[str, str], str]:
    """(file, function) -> the part of the walk, for the code in ``root``. No other may have been imported before."""
    sys.path[:0] = [str(root / name) for name in ("examples", "configuration", "kernels", ".")]
    walk = Walk(root)
    with _inside_custom_operators(walk):
        import run_image_classification as script
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, _in_place_of_training(walk):
        _write_data(Path(folder))
        given, sys.argv = sys.argv, ["walk", "--dataset", folder, "--output_dir", f"{folder}/out"]
        try:
            script.main()
        finally:
            sys.argv = given
    return {key: part for key, part in walk.frames.items() if key in walk.returning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    frames = walk_of_a_batch(parser.parse_args().root.resolve())
    part = None
    for (file, function), of_part in frames.items():
        if of_part != part:
            print(f"\n{of_part}")
            part = of_part
        print(f"  {file}: {function}")
    print(f"\n{len(frames)} frames in {len({file for file, _ in frames})} files")


if __name__ == "__main__":
    main()
