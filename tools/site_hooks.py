"""Hooks of MkDocs: links from pages to files outside docs/ work in the site, too.

On GitHub, and in an editor, `../SECURITY.md` leads to the file. The site has docs/ only, so each
file outside that a page links to becomes a part of the site, below `project/`: Markdown as a page,
with the links that it has itself, and anything else as it is. A folder stands for its README.md.
A link to what does not exist stays as it is, and ends the build as any broken link does.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, InclusionLevel

ROOT: Final = Path(__file__).parent.parent
_DOCS: Final = "docs/"
_OUTSIDE: Final = "project/"
"""Where in the site files outside docs/ are."""
_NAMELESS: Final = (
    ('data-md-component="search" role="dialog"', "Search"),
    ('<input type="checkbox"', "Done"),
)
"""What screen readers meet on pages, and the theme gives no name."""
_LINK: Final = re.compile(r"(\]\()((?!https?:|mailto:|#)[^)#\s]+)")


def on_config(config: Any) -> Any:
    """Let pages name modules of `tools`, wherever the build was started."""
    sys.path.insert(0, str(ROOT))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to, and those that these link to in turn."""
    waiting = [_path_of(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for _, link in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = _target(page, link)
            if path is None or path in seen or path.startswith(_DOCS):
                continue
            seen.add(path)
            files.append(
                File.generated(
                    config,
                    _place_of(path),
                    abs_src_path=str(ROOT / path),
                    inclusion=InclusionLevel.NOT_IN_NAV,
                )
            )
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page whose links lead to where files are in the site."""
    here = page.file.src_uri
    path = _path_of(here)

    def moved(match: re.Match[str]) -> str:
        target = _target(path, match[2])
        if target is None or (target.startswith(_DOCS) and path.startswith(_DOCS)):
            return match[0]
        return match[1] + posixpath.relpath(_place_of(target), posixpath.dirname(here) or ".")

    return _LINK.sub(moved, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Return a page's HTML with names for screen readers."""
    for element, name in _NAMELESS:
        output = output.replace(element, f'{element} aria-label="{name}"')
    return output


def _target(page: str, link: str) -> str | None:
    """Return the path in the project of what a page links to, or None if there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path).is_dir():
        path += "/README.md"
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def _place_of(path: str) -> str:
    """Return where in the site a file of the project is."""
    return path.removeprefix(_DOCS) if path.startswith(_DOCS) else _OUTSIDE + path


def _path_of(place: str) -> str:
    """Return the path in the project of a file of the site."""
    return place.removeprefix(_OUTSIDE) if place.startswith(_OUTSIDE) else _DOCS + place
