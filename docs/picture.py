"""Draw docs/img/run.svg, the README's picture, from a real demo run: python docs/picture.py"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedstrata.cli import console
from fedstrata.cli.run import DEMO
from fedstrata.config.schema import RunConfig, validate_settings
from fedstrata.run import open_run


def main() -> None:
    """Run the demo, and draw what it prints."""
    screen = Console(record=True, width=92, force_terminal=True, color_system="truecolor", file=io.StringIO())
    config = validate_settings(RunConfig, DEMO)
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        federation = open_run(config, Path("runs/demo"))
        screen.print(Text("$ fedstrata demo", style="bold green"))
        shown = console.header(federation, {"data": f"{config.dataset}, {config.partition}", "model": config.model})
        screen.print(shown)
        history = federation.fit()
        screen.print(console.summary(history, Path("runs/demo")))
    svg = screen.export_svg(title="fedstrata demo")
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.S).replace("Fira Code", "ui-monospace, Menlo, Consolas")
    (here / "img" / "run.svg").write_text(svg)


if __name__ == "__main__":
    main()
