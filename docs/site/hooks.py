"""MkDocs hooks: files outside of docs/ that a page links to become a part of the site.

Pages link to files by their paths in the repository, so that the links also work there. The site
has these files in repository/, and the files that they link to.
"""

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, directly or through other added pages."""
    pages = [file.src_uri for file in files.documentation_pages()]
    while pages:
        uri = pages.pop()
        for link in LINK.finditer((ROOT / _path_of(uri)).read_text("utf-8")):
            target = _target_of(uri, link[3])
            if target and files.get_file_from_path(target) is None:
                path = str(ROOT / _path_of(target))
                files.append(File.generated(config, target, abs_src_path=path))
                pages += [target] * target.endswith(".md")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the site's copies; leave only the text of links to folders without README."""
    uri = page.file.src_uri
    if uri.startswith("repository/"):
        page.meta["search"] = {"exclude": True}

    def replace(link: re.Match[str]) -> str:
        mark, text, path, anchor = link.groups("")
        if ":" in path:
            return link[0]
        target = _target_of(uri, path)
        return f"{mark}[{text}]({relpath(target, dirname(uri) or '.')}{anchor})" if target else text

    return LINK.sub(replace, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Mark code of one short word, such as a flag, which no line end should divide."""
    return re.sub(r"<code>([^\s<]{1,30})</code>", r'<code class="word">\1</code>', html)


def _path_of(uri: str) -> str:
    """Return the path in the repository of a file of the site."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def _target_of(uri: str, link: str) -> str | None:
    """Return the place in the site of a link's file; None for folders and other sites."""
    path = normpath(join(dirname(_path_of(uri)), link))
    if (ROOT / path / "README.md").is_file():
        path = f"{path}/README.md"
    if ":" in link or not (ROOT / path).is_file():
        return None
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
