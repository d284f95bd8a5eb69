"""Draw docs/img/run.svg, the README's picture, from a real demo: python docs/picture.py"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedstrata.cli import demo


def main() -> None:
    """Run the demo, and draw what it prints, but for the runs as they pass."""
    screen = Console(
        record=True, width=112, force_terminal=True, color_system="truecolor", file=io.StringIO(), highlight=False
    )
    out, here = Path("runs/demo"), Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        screen.print(Text("$ fedstrata demo", style="bold green"))
        screen.print(f"{demo.STORY}\n")
        demo.show(demo.find_out(out, screen, Console(quiet=True)), out, screen)
    svg = screen.export_svg(title="fedstrata demo")
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.S).replace("Fira Code", "ui-monospace, Menlo, Consolas")
    (here / "img" / "run.svg").write_text(svg)


if __name__ == "__main__":
    main()
