"""The console script `hf-actcompress`. Imports of torch and transformers wait until a command needs them."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..quick.preset_lines import PRESET_LINES
from ..versions import version_of
from . import bench, doctor, env, estimate, page, plan, report
from .common import EXIT_CODES, Exit, UsageError, exit_codes, fail


class _Commands(TyperGroup):
    """Shows every error in one line, and ends with its exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with exit_codes():
                return super().invoke(ctx)
        except UsageError as error:
            fail(error.format_message(), Exit.USAGE)


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-actcompress {version_of('hf-actcompress') or 'not installed, running from source'}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
]


@app.callback(epilog=EXIT_CODES)
def main(version: Version = False) -> None:
    """Fine-tune transformers with less activation memory, and know what a run needs before you start it."""
    # transformers reads this when it is imported; its remarks on configs are not part of an answer
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


# options that a command does not know, and all that follow, are passed to another program
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(epilog=EXIT_CODES)(estimate.estimate)
app.command(epilog=EXIT_CODES)(plan.plan)
app.command(epilog=EXIT_CODES)(report.report)
app.command(epilog=EXIT_CODES)(doctor.doctor)
app.command(epilog=EXIT_CODES, context_settings=_PASSED_ON)(bench.bench)
app.command(epilog=EXIT_CODES)(env.env)
app.command(epilog=EXIT_CODES)(page.page)


@app.command(epilog=EXIT_CODES)
def presets() -> None:
    """List the presets, one line each."""
    width = max(map(len, PRESET_LINES))
    for name, line in PRESET_LINES.items():
        typer.echo(f"{name:<{width}}  {line}")
