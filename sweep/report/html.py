"""report.html: the markdown report as one file that can be sent alone."""

import base64
import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums;
        display: block; overflow-x: auto; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .6rem; vertical-align: top; }
th { border-bottom: 2px solid #888; text-align: left; }
img { max-width: 100%; height: auto; }
code { background: #f2f2f2; padding: .1em .3em; border-radius: 3px; }
pre { background: #f2f2f2; padding: .8rem; overflow-x: auto; }
pre code { padding: 0; }
""".strip()


def to_html(markdown: str, title: str, folder: Path) -> str:
    """Render markdown as one XHTML page.

    Args:
        markdown: the report; HTML in it is shown, not interpreted.
        title: of the page.
        folder: where the figures lie that the report names; they are embedded.
    """
    parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": True}).enable("table")
    body = parser.render(markdown)
    body = re.sub(r'src="([^":]+)"', lambda found: _embedded(folder / found[1]), body)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8" />\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1" />\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def _embedded(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'src="data:image/png;base64,{data}"'
