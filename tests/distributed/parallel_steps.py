"""Run by torchrun on two processes: the same training steps with DDP and FSDP2, and a forward with tensor parallelism.

torchrun --nproc_per_node 2 parallel_steps.py FOLDER

FOLDER holds a model and data.safetensors; every process trains on its half of each batch. Rank 0 writes the parameters
after training to ddp.st and fsdp2.st, and the logits of the sharded model to tp.st.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from modeling_itnet import ITNetForImageClassification

STEPS = 3


def train(model, parameters, data, rank, world):
    """SGD on this rank's part of every batch: pixel_values [steps, B, C, H, W], labels [steps, B]."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    model.train()
    for pixels, labels in zip(data["pixel_values"], data["labels"], strict=True):
        optimizer.zero_grad()
        model(pixel_values=pixels.chunk(world)[rank], labels=labels.chunk(world)[rank]).loss.backward()
        optimizer.step()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 2
    torch.set_num_threads(1)
    data = load_file(folder / "data.safetensors")

    model = ITNetForImageClassification.from_pretrained(folder)
    train(DistributedDataParallel(model), model.parameters(), data, rank, world)
    if rank == 0:
        save_file({name: value.detach().contiguous() for name, value in model.state_dict().items()}, folder / "ddp.st")

    mesh = init_device_mesh("cpu", (world,))
    model = ITNetForImageClassification.from_pretrained(folder)
    for layer in model.itnet.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, model.parameters(), data, rank, world)
    sharded = dict(model.named_parameters())
    assert any(value.to_local().numel() < value.numel() for value in sharded.values()), "nothing was sharded"
    whole = {name: value.detach().full_tensor().contiguous() for name, value in sharded.items()}
    if rank == 0:
        save_file(whole, folder / "fsdp2.st")

    model = ITNetForImageClassification.from_pretrained(folder, tp_plan="auto").eval()
    layer = model.itnet.layers[0]
    local = [getattr(weight, "to_local", lambda w=weight: w)() for weight in layer.feed_forward.parameters()]
    sizes = torch.tensor([sum(weight.numel() for weight in local)])
    with torch.no_grad():
        logits = model(pixel_values=data["pixel_values"][0]).logits
    if rank == 0:
        save_file({"logits": logits.contiguous(), "feed_forward_size": sizes}, folder / "tp.st")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
