"""`python -m fedstrata`, and what the command `fedstrata` runs."""

import sys

from fedstrata.system import signals


def main() -> None:
    """Run the command, which may be stopped from the first moment on."""
    with signals.handle_signals() as stop:
        try:
            from fedstrata.cli.main import main as command

            command()
        except KeyboardInterrupt:  # before the command began
            stop.acknowledge()
            print("fedstrata: stopped", file=sys.stderr)
            sys.exit(stop.code)


if __name__ == "__main__":
    main()
