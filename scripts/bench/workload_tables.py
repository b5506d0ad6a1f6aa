"""Names of backends in tables."""

from __future__ import annotations

from typing import Any


def backend_name(record: dict[str, Any]) -> str:
    """Of a record's backend in tables; `version` in a case is of code that was replaced since."""
    if record["impl"] != "hybrid_mla":
        return str(record["impl"]).removeprefix("sglang_")
    case = record["case"]
    parts = ["hybrid_mla", *(["FP8 prefix"] if "fp8_e4m3" in case.get("flags", "") else []), case.get("version")]
    return ", ".join(filter(None, parts))
