# SPDX-License-Identifier: Apache-2.0
"""Writes the package as a flat set of modules, which is what Transformers loads with ``trust_remote_code=True``.

The loader follows ``from .sibling import name`` only. So every module becomes a file with a name of its own, and every
import between our modules is rewritten, by its syntax tree, to name the file that defines what is imported.

- ``from package import name`` follows re-exports to the module that defines the name.
- The table of modalities shrinks to the row of the exported model and the default one; the function that finds its
  encoder imports it.
- What a mode needs that the model does not run is left out; its names stand for classes that say so.
- An absolute import of ours inside ``try``/``except ImportError`` stays: it asks for the installed package, if any.
- ``import package`` and modules imported as names have no flat form and are errors.
"""

import ast
import importlib.util
from collections.abc import Container
from dataclasses import replace
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from transformers.dynamic_module_utils import get_relative_imports

from configuration_itnet import MODALITIES, ITNetConfig, Modality, find_modality

from ..modalities import find_encoder, load

PACKAGES = ("configuration_itnet", "itnet_kernels", "modeling_itnet")
#: What only some modes need, and which; "edges" are those of graphs, in every mode. Whatever imports one of these
#: modules asks for the mode, or for edges, before it uses it.
MODE_MODULES = {
    "itnet_kernels.integral_transform": ("exact", "near_far", "monte_carlo"),
    "itnet_kernels.low_rank.matrix": ("low_rank", "near_far"),
    "itnet_kernels.low_rank.state": ("low_rank", "near_far"),
    "itnet_kernels.low_rank.vector": ("low_rank", "near_far"),
    "itnet_kernels.near.balls": ("near_far",),
    "itnet_kernels.near.blocks": ("near_far",),
    "itnet_kernels.near.windows": ("near_far",),
    "itnet_kernels.sampled.anchors": ("monte_carlo",),
    "itnet_kernels.sampled.list_sum": ("near_far", "monte_carlo", "edges"),
    "itnet_kernels.sampled.monte_carlo": ("monte_carlo",),
    "itnet_kernels.sampled.sampled": ("low_rank", "near_far", "monte_carlo", "edges"),
    "modeling_itnet.integration.factors": ("low_rank", "near_far"),
    "modeling_itnet.integration.near": ("near_far",),
    "modeling_itnet.integration.proposal": ("monte_carlo",),
}
#: What only causal models need.
CAUSAL_MODULES = ("modeling_itnet.generation.cache", "modeling_itnet.integration.documents")
_ABSENT = """class {name}:
    def __init__(self, *args, **kwargs):
        raise ImportError("{name} is not in this folder, as its model does not use it: load it with the itnet package")
"""


class Module(NamedTuple):
    name: str  # dotted
    package: str  # what its relative imports start from
    source: str
    tree: ast.Module


def flat_name(module: str) -> str:
    """Turns modeling_itnet.encoders.text into modeling_itnet_encoders_text; a module named as its package keeps it."""
    parts = module.split(".")
    return "_".join(part for index, part in enumerate(parts) if index == 0 or part != parts[index - 1])


def flat_reference(cls: type) -> str:
    """Returns what ``auto_map`` calls a class: "file.Class"."""
    return f"{flat_name(cls.__module__)}.{cls.__name__}"


def flat_sources(config: ITNetConfig, *classes: type) -> dict[str, str]:
    """Returns file name -> source of all modules that ``classes`` need, for models of one configuration."""
    modes = {*config.integration_modes, *(mode for cls in classes for mode in getattr(cls, "own_modes", ()))}
    modality, encoder = find_modality(config.modality), find_encoder(config)
    # Encoders of other packages may join positions by edges without taking any as an input.
    if "neighbors" in encoder.optional or encoder.__module__.split(".")[0] not in PACKAGES:
        modes.add("edges")
    absent = {name for name, needing in MODE_MODULES.items() if modes.isdisjoint(needing)}
    absent |= set() if config.is_causal else {*CAUSAL_MODULES}
    sources, waiting, owners = {}, [cls.__module__ for cls in classes], {}
    while waiting:
        module = read_module(waiting.pop())
        file = f"{flat_name(module.name)}.py"
        if owners.setdefault(file, module.name) != module.name:
            raise ValueError(f"{module.name} and {owners[file]} have the same flat name {file}")
        if file not in sources:
            is_ours = module.name.split(".")[0] in PACKAGES  # others do not ask for a mode
            sources[file], imported = _flatten(_for_one(modality, module), absent if is_ours else ())
            waiting += imported
    return dict(sorted(sources.items()))


def write_flat_sources(folder: Path, config: ITNetConfig, *classes: type) -> None:
    """Writes the modules that ``classes`` need, and checks that the loader will read their imports as we do."""
    for file, source in flat_sources(config, *classes).items():
        (folder / file).write_text(source, encoding="utf-8")
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        wanted = {node.module for node in imports if node.level > 0}
        found = set(get_relative_imports(folder / file))
        if found != wanted:
            raise ValueError(f"{file}: the loader takes {sorted(found - wanted)} in a docstring for an import")


def _for_one(modality: Modality, module: Module) -> Module:
    """Returns the module as an exported model has it. The table has two rows, the model's own and that of a default
    configuration, which Transformers makes to compare with; both hold only what a configuration reads. The module that
    finds encoders becomes one function."""
    if module.name == Modality.__module__:
        empty = {
            name: getattr(Modality, name) for name in ("encoder", "heads", "processor", "reader", "plot", "example")
        }
        rows = [replace(row, **empty, title="", inputs="") for row in (find_modality(ITNetConfig.modality), modality)]
        table = {row.name: row for row in rows}
        lines = module.source.splitlines()
        for node in reversed(module.tree.body):
            if isinstance(node, ast.Assign) and node.targets[0].id in ("MODALITIES", "_ROWS"):
                new = [f"MODALITIES = {table!r}"] if node.targets[0].id == "MODALITIES" else []
                lines[node.lineno - 1 : node.end_lineno] = new
        source = "\n".join(lines)
    elif module.name == find_encoder.__module__:
        encoder = load(modality.encoder)
        source = f'''"""The encoder that this model has."""


def find_encoder(config):
    if config.modality != {modality.name!r}:
        raise ValueError(f"`modality` ({{config.modality!r}}) must be {modality.name!r}: this code has no other")
    from {encoder.__module__} import {encoder.__name__}

    return {encoder.__name__}
'''
    else:
        return module
    return module._replace(source=source, tree=ast.parse(source))


@cache
def read_module(name: str) -> Module:
    spec = importlib.util.find_spec(name)
    source = Path(spec.origin).read_text(encoding="utf-8")
    return Module(name, spec.parent, source, ast.parse(source))


def _flatten(module: Module, absent: Container[str] = ()) -> tuple[str, list[str]]:
    """Returns the source with flat imports, and the modules that it imports, none of which is ``absent``."""
    lines = module.source.splitlines()
    optional = {node for block in ast.walk(module.tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    imports = [node for node in ast.walk(module.tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = []
    for node in sorted(imports, key=lambda node: -node.lineno):  # from the last, so that line numbers stay true
        if isinstance(node, ast.Import):
            if any(_is_ours(alias.name) for alias in node.names):
                where = f"{module.name}:{node.lineno}"
                raise ValueError(f"{where}: write `from package import name`, not `import package`")
            continue
        target = _target(module, node)
        if not _is_ours(target) or (node.level == 0 and node in optional):
            continue
        by_definer: dict[str, list[str]] = {}
        for alias in node.names:
            definer = _definer(target, alias.name, f"{module.name}:{node.lineno}")
            by_definer.setdefault(definer, []).append(ast.unparse(alias))
        imported += [definer for definer in by_definer if definer not in absent]
        margin = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [
            indent("\n".join(_ABSENT.format(name=name) for name in names), margin)
            if definer in absent
            else f"{margin}from .{flat_name(definer)} import {', '.join(names)}"
            for definer, names in by_definer.items()
        ]
    note = f"# Generated from {module.name} of the itnet package, which is where to edit it."
    return "\n".join([note, *lines, ""]), imported


def _target(module: Module, node: ast.ImportFrom) -> str:
    """Returns the absolute name of the module that ``node`` imports from."""
    return importlib.util.resolve_name("." * node.level + (node.module or ""), module.package)


def _definer(target: str, name: str, where: str) -> str:
    """Returns the module that defines ``name``, which ``target`` may only re-export."""
    module = read_module(target)
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and _is_ours(_target(module, node)):
            for alias in node.names:
                if name == (alias.asname or alias.name) == alias.name:
                    return _definer(_target(module, node), name, where)
    if module.package == target and importlib.util.find_spec(f"{target}.{name}") is not None:
        raise ValueError(f"{where}: import names from the module {target}.{name}, not the module itself")
    return target


def _is_ours(module: str) -> bool:
    """Says whether a module is exported with what imports it, as those of our packages and of the table's rows are."""
    named = {reference.split(":")[0].split(".")[0] for row in MODALITIES.values() for reference in row.exported}
    return module.split(".")[0] in {*PACKAGES, *named} - {""}
