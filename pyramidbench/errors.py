"""Errors that a user can act on, and the near-name hint that their messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the caller can fix. The message says what was given, what is accepted and what to do.

    The command line shows it as one line and exits with `exit_code`.
    """

    exit_code = 2


def unknown(kind: str, given: str, accepted: Iterable[str]) -> UserError:
    """The error for a name that does not exist: suggests the nearest one and lists what is accepted."""
    names = sorted(accepted)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(f"unknown {kind} '{given}'.{hint} Accepted: {', '.join(names)}.")
