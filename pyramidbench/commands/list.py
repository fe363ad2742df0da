"""`pyramidbench list`: the methods, suites and inputs that there are."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from pyramidbench.flags import AsJson, Text


def list_things(
    what: Annotated[str, Argument(help="methods, suites or inputs")] = "",
    name: Annotated[Text, Argument(help="one of them, in full")] = None,
    markdown: Annotated[bool, Option("--markdown", help="print the methods as a Markdown table")] = False,
    json: AsJson = False,
) -> None:
    """Show the methods, suites or inputs that there are, or one of them in full."""
    from pyramidbench.catalogue import catalogue, describe_one, method_facts
    from pyramidbench.errors import UserError, unknown
    from pyramidbench.output import console, print_json, say
    from pyramidbench.reference import facts_markdown
    from pyramidbench.render import show_methods, show_table

    if not what:
        raise UserError("nothing to list was named. Accepted: methods, suites, inputs.")
    if what not in ("methods", "suites", "inputs"):
        raise unknown("thing to list", what, ("methods", "suites", "inputs"))
    if name is not None:
        say(console(), describe_one(what, name))
        return
    if markdown and what != "methods":
        raise UserError(f"--markdown is there for methods, not for {what}; leave it out, or give --json.")
    entries = catalogue(what)
    if markdown:
        say(console(), facts_markdown())
    elif json:
        print_json([entry.model_dump() for entry in entries])
    elif what == "methods":
        show_methods(console(), method_facts())
    else:
        show_table(
            console(), what.capitalize(), [[entry.name, entry.text] for entry in entries], ["name", "what it is"]
        )
