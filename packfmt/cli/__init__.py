"""The command line: parse, call, print. Errors become one line and an exit code here and nowhere else."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import click

from packfmt.cli.flags import as_flags
from packfmt.errors import PackfmtError
from packfmt.version import __version__

__all__ = ["main"]

FAMILIES = {
    "pack": "packing",
    "convert": "convert",
    "info": "looking",
    "verify": "looking",
    "cat": "looking",
    "unpack": "looking",
    "profile": "profile",
    "demo": "demo",
}


class _Verbs(click.Group):
    """Loads a verb's module when it is called, so that `packfmt --help` and `packfmt cat` start fast."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(FAMILIES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in FAMILIES:
            return None
        module = __import__(f"packfmt.cli.{FAMILIES[name]}", fromlist=[name])
        command: click.Command = getattr(module, name)
        return command


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show a traceback when something fails (before or after the command).")
@click.version_option(__version__, prog_name="packfmt")
def group(debug: bool) -> None:
    """Pack small images into memory-mapped shards and train from them."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage, 130 and 143 interrupted."""
    arguments, debug = _without_debug(sys.argv[1:] if arguments is None else list(arguments))
    signal.signal(signal.SIGTERM, _terminate)
    if sys.stdout is None:  # also, the next file that is opened would become what child processes print to
        sys.exit(_say("standard output is closed; send it to a file, or to /dev/null", 1))
    try:
        group.main(arguments, prog_name="packfmt", standalone_mode=False)
        sys.stdout.flush()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = _say("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output has gone (`packfmt cat ... | head`): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (PackfmtError, OSError, ValueError, KeyError, IndexError) as error:
        if debug:
            traceback.print_exc()
        code = _say(as_flags(_describe(error)), 1)
    sys.exit(code)


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without --debug, wherever it stands before a "--", and whether it was there."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return options + arguments[end:], len(options) < end


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror or error}"
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    return str(error) or type(error).__name__


def _say(message: str, code: int) -> int:
    if sys.stderr is not None:  # closed: print would take standard output
        print(f"packfmt: {message}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return code


def _terminate(number: int, frame: FrameType | None) -> Any:
    raise SystemExit(128 + number)
