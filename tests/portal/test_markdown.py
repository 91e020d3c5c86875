"""Test Markdown on pages: people's formatting, and nothing harmful."""

from __future__ import annotations

import time

import pytest

from portal import markdown


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("**a** `b`", "<p><strong>a</strong> <code>b</code></p>"),
        ("# a", "<h2>a</h2>"),
        ("###### a", "<h6>a</h6>"),
        ("| a |\n| --- |\n| b |", "<td>b</td>"),
        ("```sh\nls <x>\n```", '<pre><code class="language-sh">ls &lt;x&gt;\n</code></pre>'),
        ("[a](/jobs/7)", '<a href="/jobs/7">a</a>'),
        ("[a](https://x.example/)", '<a href="https://x.example/" rel="noopener noreferrer nofollow">a</a>'),
        ("[a](mailto:jo@x.example)", '<a href="mailto:jo@x.example">a</a>'),
        ("<b>a</b> &amp; <!-- c -->", "<p>&lt;b&gt;a&lt;/b&gt; &amp; &lt;!-- c --&gt;</p>"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
    ],
)
def test_shows(written: str, shown: str) -> None:
    assert shown in markdown.render(written)


@pytest.mark.parametrize(
    "written",
    [
        "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](data:text/html,x)", "[a](vbscript:x)",
        "[a](file:///etc/passwd)", "[a]( javascript:alert(1))", "[a](java\tscript:x)", "<javascript:alert(1)>",
        "![a](https://x.example/pixel.png)", '<img src="https://x.example/pixel.png">',
        '[a](/x "onmouseover=alert(1)")<svg onload=alert(1)>', "[a]: javascript:x\n\n[a]",
    ],
)  # fmt: skip
def test_nothing_runs_and_nothing_is_loaded(written: str) -> None:
    html = markdown.render(written)
    assert "<img" not in html
    assert "<svg" not in html
    assert 'href="javascript' not in html.lower()
    for scheme in ("data:", "vbscript:", "file:", "java"):
        assert f'href="{scheme}' not in html.lower()


def test_addresses_may_be_rewritten_and_headings_stay_below_those_of_the_page() -> None:
    assert 'href="/runbooks/x"' in markdown.render("[a](x.md)", link=lambda href: f"/runbooks/{href[:-3]}")
    assert markdown.render("# a\n## b", deeper=0) == "<h2>a</h2>\n<h2>b</h2>\n"


@pytest.mark.parametrize("piece", ["[", "*", "`", "> ", "![](", "**_", "\\", "&#", "<a ", "- "])
def test_hostile_text_takes_no_time(piece: str) -> None:
    began = time.process_time()
    markdown.render(piece * (markdown.MAX_CHARACTERS // len(piece)))
    assert time.process_time() - began < 3
