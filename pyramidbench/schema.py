"""The schema of what a run leaves behind: its version, what each version added, and JSON Schema made of the models.

A version is added whenever a column or key is, so that an older pyramidbench refuses a newer run with a message instead of
calling it damaged. Older runs load: what they lack is null.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel

from pyramidbench.device import Device
from pyramidbench.errors import unknown
from pyramidbench.manifest import Manifest
from pyramidbench.record import SCHEMA_VERSION, Record

Part = Literal["record", "manifest", "device"]
MODELS: dict[Part, type[BaseModel]] = {"record": Record, "manifest": Manifest, "device": Device}
FILES: dict[Part, str] = {"record": "a line of cells.jsonl", "manifest": "manifest.json", "device": "device.json"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
ADDED: dict[int, dict[Part, tuple[str, ...]]] = {
    2: {
        "record": (
            "latency_p5_s", "latency_q1_s", "latency_q3_s", "latency_p95_s", "threads", "session", "setup_s", "host_s",
            "graph_latency_s", "graph_latency_low_s", "graph_latency_high_s", "sm_clock_hz", "power_w", "temperature_c",
            "throttle_reasons", "speedup_low", "speedup_high", "memory_flagged", "reserved_memory_bytes", "build_peak_bytes",
            "build_expected_bytes", "route_peak_bytes", "route_expected_bytes", "index_peak_bytes", "attend_peak_bytes",
            "attend_expected_bytes", "backward_peak_bytes", "backward_expected_bytes", "append_s", "append_peak_bytes",
            "bytes_per_token", "budget_set", "budget_reached", "graph_dense_method", "graph_speedup", "graph_speedup_low",
            "graph_speedup_high",
        ),
        "manifest": ("sources",),
    },
}  # fmt: skip
"""What each version after the first added, by part."""


def json_schema(part: str) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one part of a run's folder: "record", "manifest" or "device".

    Raises:
        UserError: another part.
    """
    chosen = next((name for name in get_args(Part) if name == part), None)
    if chosen is None:
        raise unknown("part of a run", part, MODELS)
    made = MODELS[chosen].model_json_schema(by_alias=True)
    head = {
        "$schema": DIALECT,
        "$id": f"urn:pyramidbench:run:{SCHEMA_VERSION}:{chosen}",
        "title": f"pyramidbench {chosen}",
    }
    return (
        head
        | {"description": f"{FILES[chosen]}, schema version {SCHEMA_VERSION}"}
        | {key: value for key, value in made.items() if key not in ("title", "description")}
    )


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of every part, by name."""
    return {part: json_schema(part) for part in MODELS}
