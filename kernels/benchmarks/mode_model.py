"""The model of gpu_model.py for the other modes: sums over lists of keys, and low rank. Predictions, never measured.

Their workspaces (256 MB) do not fit L2, so that what one kernel writes and another reads passes the memory. Launches
per chunk and call are those that tests/kernels/test_triton_mode_launches.py counts.
"""

from gpu_model import HEAD_DIM, WIDTH, Device, Work, predict

LIST_WORKSPACE = 256 * 2**20
#: Launches of a chunk of queries, forward and backward; with lists per sample, and with lists that all samples share.
LIST_LAUNCHES = {True: {"forward": 9, "backward": 43}, False: {"forward": 7, "backward": 20}}
#: Of a whole call in the vector form, and bytes of a position and head. The backward is taken as three forwards.
LOW_RANK_LAUNCHES, LOW_RANK_BYTES = 24, 512
POSITION_FEATURES = 128
#: Bytes of a pair of positions that a learned proposal moves: scores, softmax, mixture, prefix sums, in float32.
PROPOSAL_BYTES = 40


def list_work(
    counts: dict[str, dict], heads: int, n: int, batch: int, length: int, is_own: bool = True
) -> dict[str, dict[str, Work]]:
    """Returns the parts of a layer's sum over ``length`` keys per query, by pass."""
    queries, lists = batch * n, (batch if is_own else 1) * n
    rows = heads * queries * WIDTH
    elements, moments = rows * length, 2 * rows * HEAD_DIM  # the latter in bytes
    bias, keys = 2 * lists * length * WIDTH, 2 * heads * HEAD_DIM * queries * length
    gemm, position_gemm = 2 * rows * HEAD_DIM**2, 2 * POSITION_FEATURES * lists * length * WIDTH

    def pairs(name: str, products: int, hbm: float) -> Work:
        report = counts["lists"][name]
        config = report["config"]
        slots = report["loop_instructions"] * 32 * config["num_warps"] / (config["KC"] * config["BK"])
        return Work(2 * products * HEAD_DIM * elements, slots * elements, hbm=hbm)

    forward = {
        "bias": Work(position_gemm, hbm=bias),
        "pairs": pairs("list forward", 2, bias + moments),
        "W2": Work(gemm, hbm=moments),
    }
    backward = {
        "bias": Work(position_gemm, hbm=bias),
        "dA": Work(gemm, hbm=moments),
        "pairs": pairs("list backward", 6, bias + 3 * moments + 2 * elements + keys),
        "keys": Work(hbm=keys),
        "W2": Work(gemm, hbm=moments),
        "content": Work(hbm=moments),
        # dL/dpre summed over heads into float32, scaled, and multiplied with both ends' features
        "positions": Work(2 * position_gemm, hbm=2 * elements + 16 * lists * length * WIDTH),
    }
    return {"forward": forward, "backward": backward}


def list_launches(heads: int, n: int, batch: int, length: int, is_own: bool = True) -> dict[str, int]:
    """Launches by pass: chunks of queries of as many samples as the workspace holds."""
    found = {}
    bias = 2 * WIDTH * length
    own = {"forward": 2 * WIDTH * HEAD_DIM, "backward": 2 * (3 * WIDTH * HEAD_DIM + (WIDTH + HEAD_DIM) * length)}
    for kind, group in own.items():
        rows = max(1, min(n, LIST_WORKSPACE // (heads * group + bias)))
        samples = max(1, LIST_WORKSPACE // (rows * (heads * group + bias)))
        chunks = -(-n // rows) * -(-batch // samples)
        found[kind] = chunks * LIST_LAUNCHES[is_own][kind]
    return found


def list_seconds(counts: dict, device: Device, heads: int, n: int, batch: int, length: int, is_own: bool = True):
    """Predicts (forward, backward) of a layer's sum over lists."""
    work = list_work(counts, heads, n, batch, length, is_own)
    launches = list_launches(heads, n, batch, length, is_own)
    return tuple(predict(work[kind], device, 1, launches[kind]) for kind in ("forward", "backward"))


def low_rank_seconds(device: Device, heads: int, n: int, batch: int):
    """Predicts (forward, backward) of a layer's low-rank kernel from bytes and launches."""
    work = Work(hbm=LOW_RANK_BYTES * heads * n * batch)
    three = Work(hbm=3 * work.hbm)
    return (
        predict({"sums": work}, device, 1, LOW_RANK_LAUNCHES),
        predict({"sums": three}, device, 1, 3 * LOW_RANK_LAUNCHES),
    )


def proposal_seconds(device: Device, n: int, batch: int) -> float:
    """Returns what drawing from a learned proposal takes."""
    return PROPOSAL_BYTES * batch * n * n / device.hbm / 1e12
