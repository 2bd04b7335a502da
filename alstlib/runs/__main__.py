"""Where the command `alst` begins: an interrupt while its modules are imported, which takes a second, is said in a
line."""

from __future__ import annotations

import sys


def main() -> int:
    try:
        from alstlib.runs.cli import main as command

        return command()
    except KeyboardInterrupt:
        print("\nalst: interrupted before anything was started", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
