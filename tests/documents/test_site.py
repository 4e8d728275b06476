"""The documentation builds from a copy of the repository without a warning; every public name and link is there."""

import html.parser
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

import configuration_itnet
import itnet_kernels
import modeling_itnet

from .extract import ROOT


def build(folder: Path) -> Path:
    """Builds the pages, in a copy of the repository, as the build writes beside the sources; it runs all guides."""
    clone, target = folder / "clone", folder / "html"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "generated")
    shutil.copytree(
        ROOT,
        clone,
        ignore=lambda path, names: {*unwanted(path, names), *(["tests", "data"] if Path(path) == ROOT else [])},
    )
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", str(target)]
    paths = os.pathsep.join(str(clone / name) for name in (".", "configuration", "kernels"))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return target


class Page(html.parser.HTMLParser):
    """Anchors of a page, where it links to, and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors, self.targets, self.loaded = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.targets += [values[name] for name in ("href", "src") if values.get(name)]
        is_style = tag == "link" and "stylesheet" in (values.get("rel") or "")
        self.loaded += [values.get("href" if is_style else "src") or ""] if is_style or "src" in values else []


def dead_links(pages: dict[Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        for target in page.targets:
            url = urlparse(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchor = unquote(url.fragment)
            if not file.exists() or (anchor and file in pages and anchor not in pages[file].anchors):
                yield f"{path.name} -> {target}"


def names_without_a_page(site: Path) -> Iterator[str]:
    documented = {path.stem.rpartition(".")[2] for path in (site / "generated" / "api").glob("*.html")}
    for package in (configuration_itnet, itnet_kernels, modeling_itnet):
        names = {name for name in package.__all__ if not name.startswith("__")}
        yield from (f"{package.__name__}.{name}" for name in sorted(names - documented))


@pytest.mark.slow
def test_the_site(tmp_path):
    """One test, since building takes minutes: no warning, every guide run, every name there, every link alive."""
    site = build(tmp_path)
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    assert len(pages) > 100
    assert list(dead_links(pages)) == []
    # It can be read from disk: no script, style or picture comes from another host.
    assert [url for page in pages.values() for url in page.loaded if url.startswith(("http:", "https:", "//"))] == []
    assert list(names_without_a_page(site)) == [], "add them to docs/api/"
    guides = sorted(path.stem for path in (ROOT / "docs" / "guides").glob("*.py"))
    assert len(guides) >= 12
    for name in guides:
        page = (site / "generated" / "guides" / f"{name}.html").read_text(encoding="utf-8")
        assert "sphx-glr-script-out" in page and "Total running time" in page, name  # what it printed
