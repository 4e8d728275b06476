"""The operators that separate ITNet from convolution, attention and recurrence (Corollary ordering of the paper).

python examples/paper/witnesses.py

The first table has, for each witness, how far the integral with its kernel is from the operator's own formula, and by
how much the operator violates a property that all members of the smaller class have. The second table tells operators
whose kernel depends on x, y, u(x) and u(y) alone from those whose kernel contains more: a normalisation over all keys,
or the trajectory between its two ends.
"""

import argparse

import torch

from modeling_itnet.special_cases.witnesses import all_witnesses, pair_forms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random signals")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_default_dtype(torch.float64)
    print("| witness | operator | integral − formula | property of the class; violation | size |")
    print("|---|---|---|---|---|")
    for witness in all_witnesses():
        cells = (witness.name, witness.formula, f"{witness.representation_error:.1e}", witness.obstruction)
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + f" | {witness.gap:.3g} |")

    print("\n| operator | mixed second difference in two keys | κ would need, beside x, y, u(x), u(y) |")
    print("|---|---|---|")
    with torch.no_grad():
        for form in pair_forms():
            print(f"| {form.name} | {form.difference:.1e} | {form.needs or 'nothing'} |")


if __name__ == "__main__":
    main()
