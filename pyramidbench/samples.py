"""Raw samples: every timed call of a cell, kept beside its record in the run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pyramidbench.device import slug_of
from pyramidbench.errors import UserError
from pyramidbench.record import Record


def samples_path(folder: Path, record: Record, session: str | None = None) -> Path:
    """Where the samples of a cell lie in a run folder; with a session, those it gave there as others' reference. In a run that
    was merged from several devices each has a folder of its own."""
    samples = folder / "samples"
    own = samples / slug_of(record.device or "")
    name = f"{record.cell}.npy" if session is None else f"{record.cell}.{session}.npy"
    return (own if record.device and own.is_dir() else samples) / name


def load_samples(folder: Path, record: Record) -> NDArray[np.float64] | None:
    """Seconds of each timed call, in the order of the calls; None where the run kept none.

    Raises:
        UserError: the file is damaged.
    """
    return _load(samples_path(folder, record))


def load_pairs(folder: Path, a: Record, b: Record) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Samples of two cells of a run that were timed in turns, so that those of one place belong together; None where they
    were not. A reference that was measured again in the other's session counts by what it gave there.

    Raises:
        UserError: a file is damaged.
    """
    for session in (a.session, b.session):
        if session is not None:
            mine, other = (_in_session(folder, record, session) for record in (a, b))
            if mine is not None and other is not None:
                return mine, other
    return None


def _in_session(folder: Path, record: Record, session: str) -> NDArray[np.float64] | None:
    return _load(samples_path(folder, record, None if record.session == session else session))


def _load(path: Path) -> NDArray[np.float64] | None:
    if not path.is_file():
        return None
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.float64).ravel()
    except (ValueError, OSError) as error:
        raise UserError(f"'{path}' is damaged: {' '.join(str(error).split())[:150]}; measure the cell again.") from None
