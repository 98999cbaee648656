"""mkdocs hooks: add pages from the repository's root, and fix links to files that are not pages."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FROM_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Site pages that are files at the repository's root."""

_ROLE = re.compile(r":(?:class|data|func|meth|mod):(?=<)")
"""How docstrings mark names, which Markdown does not know."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the repository's root."""
    for name, source in FROM_ROOT.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt links to the site; a link to a file outside of it becomes the file's name."""
    name = page.file.src_uri
    folder = ROOT if name in FROM_ROOT else (DOCS / name).parent
    pages = {ROOT / source: DOCS / target for target, source in FROM_ROOT.items()}

    def moved(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return link[0]
        file = Path(os.path.normpath(folder / path))
        file = pages.get(file, file)
        if DOCS in file.parents and not file.is_dir():
            return f"{picture}[{text}]({os.path.relpath(file, (DOCS / name).parent)}{mark}{anchor})"
        shown = str(file.relative_to(ROOT))
        return text if shown in text else f"{text} (`{shown}`)"

    return _LINK.sub(moved, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show the names of docstrings without their roles."""
    return _ROLE.sub("", html)
