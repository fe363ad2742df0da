"""Raw samples: every timed call of a cell, kept beside its record in the run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pyramidbench.errors import UserError
from pyramidbench.record import Record


def samples_path(folder: Path, cell: str) -> Path:
    """Where the samples of a cell lie in a run folder."""
    return folder / "samples" / f"{cell}.npy"


def load_samples(folder: Path, record: Record) -> NDArray[np.float64] | None:
    """Seconds of each timed call, in the order of the calls; None where the run kept none.

    Raises:
        UserError: the file is damaged.
    """
    path = samples_path(folder, record.cell)
    if not path.is_file():
        return None
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.float64).ravel()
    except (ValueError, OSError) as error:
        raise UserError(f"'{path}' is damaged: {' '.join(str(error).split())[:150]}; measure the cell again.") from None
