"""The command line: the commands that there are, and how a mistake or an interruption ends. No measuring happens here."""

from __future__ import annotations

import sys
from typing import cast

import typer

from pyramidbench.commands.capture import capture
from pyramidbench.commands.compare import compare
from pyramidbench.commands.doctor import doctor
from pyramidbench.commands.evaluate import evaluate
from pyramidbench.commands.list import list_things
from pyramidbench.commands.merge import merge
from pyramidbench.commands.profile import profile
from pyramidbench.commands.recall import recall
from pyramidbench.commands.report import report
from pyramidbench.commands.schema import schema
from pyramidbench.commands.sweep import sweep
from pyramidbench.commands.tune import tune
from pyramidbench.commands.verify import verify
from pyramidbench.errors import UserError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Does sparse attention pay? Sweeps attention methods, and shows speed, memory and quality in one row.",
)
app.command("sweep")(sweep)
app.command("recall")(recall)
app.command("profile")(profile)
app.command("verify")(verify)
app.command("report")(report)
app.command("compare")(compare)
app.command("tune")(tune)
app.command("merge")(merge)
app.command("capture")(capture)
app.command("evaluate")(evaluate)
app.command("list")(list_things)
app.command("doctor")(doctor)
app.command("schema")(schema)

USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""Click's UsageError, wherever it is: newer versions of typer carry a copy of click inside."""
INTERRUPTED = 130


def main() -> None:
    """Entry point of the command: a user's mistake is one line on stderr and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="pyramidbench", standalone_mode=False)
    except UserError as error:
        code = _fail(str(error), error.exit_code)
    except USAGE_ERROR as error:
        code = _fail(f"{error.format_message().rstrip('.')}; {_help(error)} says what is accepted.", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        _fail("interrupted; what was measured is safe, and the same command goes on from there.", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _help(error: typer.BadParameter) -> str:
    """The command that explains the one that was used wrongly."""
    return f"`{error.ctx.command_path if error.ctx else 'pyramidbench'} --help`"


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code
