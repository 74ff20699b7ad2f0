"""A conversion's report as one self-contained HTML page: totals, a bar for every norm, and the table. No scripts, no requests."""

from __future__ import annotations

from html import escape

from .conversion import Line, Report
from .memory import readable

__all__ = ["page"]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2733; background: #fff }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .15rem .6rem; border-bottom: 1px solid #e4e9ee }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap } code { font-size: .9em }
.bar { height: .7rem; min-width: 1px; border-radius: 2px } .before { background: #c3ccd6 } .after { background: #1f7a5c }
.bars { width: 45% } .left { color: #8a5a00 } .key { display: inline-block; width: .8rem; margin-right: .3rem }
"""


def page(report: Report, title: str) -> str:
    """The page. Bars need the byte columns, so an example at conversion."""
    counted = report.before is not None and report.after is not None
    largest = max((before(line) for line in report.lines), default=0) or 1
    chart = "".join(_bars(line, largest) for line in report.lines) if counted else ""
    rows = "".join(_row(line) for line in report.lines)
    both = ""
    if report.before is not None and report.after is not None:
        share = report.after / max(report.before, 1)
        both = (
            f'<p><span class="bar before key"></span>before {readable(report.before)}'
            f'<div class="bar before" style="width:100%"></div></p>'
            f'<p><span class="bar after key"></span>after {readable(report.after)}'
            f'<div class="bar after" style="width:{100 * share:.1f}%"></div></p>'
        )
        chart = f"<h2>Maps kept, norm by norm</h2><table id='chart'>{chart}</table>"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1><p>{escape(report.summary())}.</p>{both}{chart}"
        f"<h2>What was done</h2><table id='lines'><tr><th>layer<th>pattern<th>decision<th>saved<th>reason</tr>{rows}</table>"
        "</body></html>"
    )


def before(line: Line) -> int:
    """Bytes that a norm and its activation kept."""
    return (line.map_bytes or 0) + (line.bytes_saved or 0)


def _bars(line: Line, largest: int) -> str:
    was, now = before(line), line.map_bytes or 0
    if line.decision == "left":
        now = was
    return (
        f"<tr><td><code>{escape(line.layer or '(model)')}</code><td class='bars'>"
        f"<div class='bar before' style='width:{100 * was / largest:.1f}%'></div>"
        f"<div class='bar after' style='width:{100 * now / largest:.1f}%'></div>"
        f"<td class='number'>{readable(was)} → {readable(now)}</tr>"
    )


def _row(line: Line) -> str:
    left = " class='left'" if line.decision == "left" else ""
    return (
        f"<tr{left}><td><code>{escape(line.layer or '(model)')}</code><td>{escape(line.pattern)}<td>{escape(line.decision)}"
        f"<td class='number'>{readable(line.bytes_saved)}<td>{escape(line.reason)}</tr>"
    )
