# SPDX-License-Identifier: Apache-2.0
"""Finds and reads training recipes: YAML files that name a script of examples/ and its options."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "configuration" / "recipes"


def find_clone() -> Path:
    """Returns the clone that holds recipes and scripts: around the working directory, or else around this file."""
    for folder in (Path.cwd(), *Path.cwd().parents, ROOT):
        if (folder / "configuration" / "recipes").is_dir() and (folder / "examples").is_dir():
            return folder
    raise ValueError(
        f"there is no clone of the repository around {Path.cwd()}; training needs one: recipes and scripts are in it, "
        "not in a wheel"
    )


def find_recipe(name: str) -> Path:
    """Finds a YAML file by its path, or by its name among the recipes of the repository."""
    if Path(name).is_file():
        return Path(name)
    recipes = find_clone() / "configuration" / "recipes"
    if (recipes / f"{name}.yaml").is_file():
        return recipes / f"{name}.yaml"
    raise ValueError(f"there is no recipe {name!r}; there are {', '.join(recipe_names(recipes))}")


def recipe_names(folder: Path = RECIPES) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_recipe(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Returns the options of a recipe, `script`, the run_*.py that takes them, and `recipe`, the file itself.

    `base` names a recipe that this one builds on. `config_overrides`, a mapping of settings of ITNetConfig, joins that
    of the base setting by setting. ``above`` are the recipes that build on this one.
    """
    if path.resolve() in above:
        raise ValueError(f"{path} builds on itself by `base`")
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(recipe, dict) or not isinstance(recipe.get("config_overrides", {}), dict):
        raise ValueError(f"{path} must hold a mapping of options, and `config_overrides` in it a mapping of settings")
    if "base" in recipe:
        base = path.parent / f"{recipe.pop('base')}.yaml"
        if not base.is_file():
            raise ValueError(f"the `base` of {path} must be a recipe beside it: there is no {base}")
        base = read_recipe(base, (*above, path.resolve()))
        overrides = {**base.get("config_overrides", {}), **recipe.get("config_overrides", {})}
        recipe = {**base, **recipe, "config_overrides": overrides}
    if "script" not in recipe:
        raise ValueError(f"{path} must name a `script` of examples/, such as run_image_classification")
    return {**recipe, "recipe": str(path)}
