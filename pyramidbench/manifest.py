"""Manifest: what a run was asked to do, as it stands in manifest.json; and where the cells of a merged run come from.

Descriptions here are the text of docs/results.md.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pyramidbench.device import Device


class Source(BaseModel):
    """A run that was merged into another one."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="name of its folder")
    created: str = Field(description="when it was started, UTC")
    argv: list[str] = Field(description="its command line")
    settings: dict[str, Any] = Field(description="its settings")
    version: str = Field(description="version of pyramidbench that measured it")
    device: Device = Field(description="its device.json")
    cells: list[str] = Field(description="identities of the cells that were taken from it")


class Manifest(BaseModel):
    """What a run was asked to do."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = Field(description="version of everything in the folder; a newer one than known is refused")
    name: str = Field(description="name of the sweep")
    created: str = Field(description="when the run was started, UTC")
    argv: list[str] = Field(description="the command line")
    suite: dict[str, Any] = Field(
        description="the sweep in full, as its TOML file would have it; empty where runs of several were merged"
    )
    settings: dict[str, Any] = Field(
        description="how cells were measured, and the SHA-256 of each capture and method file that they name"
    )
    version: str = Field(description="version of pyramidbench that wrote the run")
    cells: list[str] = Field(description="identities of the planned cells, in order")
    sources: list[Source] = Field(
        default=[], description="the runs that were merged into this one; empty in a run of its own"
    )
