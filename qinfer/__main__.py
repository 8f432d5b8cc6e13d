"""`python -m qinfer` is the command `qinfer`."""

import sys

from qinfer.standard_streams import open_standard_streams


def main() -> None:
    """Runs the command line; an interrupt while it is being imported is told as one that comes later."""
    open_standard_streams()
    try:
        from qinfer.cli import main as run
    except KeyboardInterrupt:
        print("qinfer: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
