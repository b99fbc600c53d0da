"""Pages under test: their structure, and what a real headless Chromium makes of them at phone and desktop width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

VOID = {"meta", "br", "wbr", "input", "link", "img", "hr"}
WIDTHS = (360, 1280)
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
ALONE = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr")


class Page(HTMLParser):
    """What a page holds, with every tag checked to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag} {attrs}>"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if not data.strip():
            return
        before = self.text.pop()[1] if self.tags and self.tags[-1][0] == "wbr" else ""  # one word that may break
        self.text.append((self.open[-1] if self.open else "", before + data.strip()))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]

    def values(self, attribute: str) -> list[str]:
        return [value for _, attributes in self.tags if (value := attributes.get(attribute)) is not None]


def browse(folder: Path, page: str, probe: str, *flags: str) -> dict:
    """Opens the page 360 and 1280 pixels wide and returns what the script ``probe`` saw there, and ``console`` lines.

    ``probe`` defines `probe(frame)`: what it returns for each width stands under w360 and w1280.
    """
    frames = "".join(
        f'<iframe id="w{width}" style="width:{width}px;height:800px;border:0" srcdoc="{html.escape(page)}"></iframe>'
        for width in WIDTHS
    )
    script = (
        'const out = {}, frames = [...document.querySelectorAll("iframe")];\n'
        + probe
        + """
        window.addEventListener("load", () => {
          try { for (const frame of frames) out[frame.id] = probe(frame); } catch (error) { out.error = String(error); }
          document.title = JSON.stringify(out);
        });
        """
    )
    done = _chromium(folder, f"<!doctype html><title>-</title>{frames}<script>{script}</script>", *flags, "--dump-dom")
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:500]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(html.unescape(title[1])), "console": console}


def photograph(folder: Path, page: str, width: int, *flags: str) -> Path:
    """A picture of the upper 2000 pixels of the page."""
    picture = folder / f"w{width}.png"
    frame = (
        f'<body style="margin:0"><iframe style="border:0;width:{width}px;height:2000px" srcdoc="{html.escape(page)}">'
    )
    size = f"--window-size={width},2000"
    _chromium(folder, f"<!doctype html>{frame}</iframe>", *flags, size, f"--screenshot={picture}")
    return picture


def _chromium(folder: Path, page: str, *flags: str) -> subprocess.CompletedProcess[str]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    path = folder / "probe.html"
    path.write_text(page, encoding="utf-8")
    command = [chromium, *QUIET, *ALONE, f"--user-data-dir={folder / 'profile'}", "--window-size=1300,900", *flags]
    return subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=240, check=True)
