"""The page of a report: one HTML file with its interactive charts, which needs no network."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt

from sweep.config.arms import batch_colors
from sweep.report.charts import Chart

FOLDER = Path(__file__).parent
SCRIPTS = FOLDER / "scripts"  # `make scripts` writes them
LOADER = FileSystemLoader(FOLDER / "templates")
PAGE = Environment(loader=LOADER, undefined=StrictUndefined, autoescape=True, trim_blocks=True)


def to_html(
    markdown: str, title: str, charts: Mapping[str, Chart | None], sizes: Iterable[int] = ()
) -> str:
    """Render Markdown as a page; `![…](figures/NAME.png)` becomes the chart of this name.

    A heading of level 4 and what follows is folded.
    """
    headings: list[dict[str, str]] = []

    def name_heading(match: re.Match[str]) -> str:
        level, text = match.groups()
        words = re.sub("<[^>]*>|&[^;]*;", "", text).lower()
        name = re.sub(r"\W+", "-", words).strip("-")
        if name in {heading["id"] for heading in headings}:
            name += f"-{len(headings)}"
        headings.append({"level": level, "id": name, "text": text})
        return f'<h{level} id="{name}"><a href="#{name}">{text}</a></h{level}>'

    def embed(match: re.Match[str]) -> str:
        chart = charts.get(match[1])
        if chart is None:
            return ""
        picture = f"data:image/png;base64,{base64.b64encode(chart.png).decode()}"
        panels = '<div class="panel"></div>' * len(chart.panels)
        return (
            f'<figure id="chart-{match[1]}"><p class="finding">{escape(chart.title)}</p>'
            f'<div class="panels">{panels}</div>'
            f'<noscript><img src="{picture}" alt="{match[2]}"></noscript></figure>'
        )

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    body = re.sub(r'<p><img src="figures/(\w+)\.png" alt="([^"]*)"[^>]*></p>', embed, body)
    body = re.sub(r'<img src="(?!data:)[^>]*>', "", body)
    body = re.sub(r"<h([1-4])>(.*?)</h\1>", name_heading, body)
    body = body.replace("<table>", '<div class="table"><table>')
    body = body.replace("</table>", "</table></div>")

    specifications = {name: chart.panels for name, chart in charts.items() if chart}
    data = json.dumps({"charts": specifications, "colors": batch_colors(sizes)})
    paths = [SCRIPTS / "charts.min.js", FOLDER / "templates" / "page.js"]
    scripts = [path.read_text(encoding="utf-8") for path in paths]
    hashes = (hashlib.sha256(script.encode()).digest() for script in scripts)
    return PAGE.get_template("page.html.j2").render(
        title=title,
        headings=headings,
        body=body,
        data=data.replace("<", "\\u003c"),
        scripts=scripts,
        sources=[f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes],
        licences=(SCRIPTS / "LICENSES.txt").read_text(encoding="utf-8"),
    )
