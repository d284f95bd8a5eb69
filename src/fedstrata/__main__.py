"""`python -m fedstrata`, and what the command `fedstrata` runs."""

import sys

from fedstrata.system import signals


def main() -> None:
    """Run the command, which may be stopped from the first moment on."""
    with signals.handle_signals() as stop:
        try:
            try:
                from fedstrata.cli.main import main as command
            except ModuleNotFoundError as error:  # typer, rich or pydantic: without them there is no command
                if (error.name or "fedstrata").startswith("fedstrata"):
                    raise
                print(f"fedstrata: the package {error.name} is missing: pip install fedstrata", file=sys.stderr)
                sys.exit(2)
            command()
        except KeyboardInterrupt:  # before the command began
            stop.acknowledge()
            print("fedstrata: stopped", file=sys.stderr)
            sys.exit(stop.code)


if __name__ == "__main__":
    main()
