"""Links that work in a clone work on the site too.

A page may link to the script of a guide and to any file of the repository. Scripts of guides and some files outside of
docs/ are pages of the site; a link to anything else becomes plain text, as the site does not hold the file.
"""

import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
#: Files outside of docs/, and the pages that include them.
PAGES = {
    "README.md": "/index.md",
    "CONTRIBUTING.md": "/contributing.md",
    "CHANGELOG.md": "/changelog.md",
    "kernels/itnet_kernels/README.md": "/mathematics.md",
}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def page_of(path: Path) -> str | None:
    """Returns where the site has ``path``, as a link from its root."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/guides/"):
        return f"/generated/guides/{path.stem}.rst"
    return f"/{path.relative_to(DOCS).as_posix()}" if path.is_relative_to(DOCS) else PAGES.get(name)


def rewrite(text: str, folder: Path) -> str:
    """Returns ``text`` of a file in ``folder``, with links of the site."""

    def link(match: re.Match) -> str:
        path = Path(os.path.normpath(folder / match["path"]))
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # code, or a dead link, of which Sphinx warns
        page = page_of(path)
        return f"{match['image']}[{match['text']}]({page}{match['anchor'] or ''})" if page else match["text"]

    return LINK.sub(link, text)


def read_page(app, docname: str, source: list[str]) -> None:
    if not docname.startswith("generated/"):
        source[0] = rewrite(source[0], (DOCS / docname).parent)


def read_included(app, path: Path, docname: str, source: list[str]) -> None:
    source[0] = FRONT_MATTER.sub("", rewrite(source[0], (DOCS / path).resolve().parent))


def setup(app) -> dict:
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    return {"parallel_read_safe": True}
