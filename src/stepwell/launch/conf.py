"""What `--rdzv-conf` may say, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stepwell.errors import ConfigError


@dataclass(frozen=True)
class Conf:
    """The options of hot restart. All agents of a job are given the same."""

    interval: float = 1.0
    misses: int = 3
    grace: float = 2.0
    spare_timeout: float = 120.0
    timeout: float = 900.0
    late: float = 120.0
    stop_seconds: float = 5.0
    store_seconds: float = 30.0
    min_free_gb: float = 0.0
    probe: str = ""
    probe_seconds: float = 60.0
    node_failures: int = 3
    restarts: int | None = None

    @property
    def dead_seconds(self) -> float:
        """Silence after which a node counts as dead."""
        return self.interval * self.misses


def read_conf(given: Mapping[str, Any]) -> Conf:
    """Parse and check. Raises ConfigError that names the option."""
    known = {field.name: field for field in fields(Conf)}
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(f"--rdzv-conf has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        kind = str(known[name].type)
        try:
            values[name] = str(value) if kind == "str" else float(value) if kind == "float" else int(value)
        except ValueError:
            raise ConfigError(f"--rdzv-conf {name}={value}: not a number") from None
    conf = Conf(**values)
    for name in ("interval", "misses", "timeout", "late", "store_seconds", "probe_seconds"):
        if not 0 < getattr(conf, name) < math.inf:
            raise ConfigError(f"--rdzv-conf {name}={getattr(conf, name)}: must be above zero")
    for name in ("grace", "spare_timeout", "stop_seconds", "min_free_gb", "node_failures"):
        if not 0 <= getattr(conf, name) < math.inf:
            raise ConfigError(f"--rdzv-conf {name}={getattr(conf, name)}: must not be below zero")
    if conf.restarts is not None and conf.restarts < 0:
        raise ConfigError(f"--rdzv-conf restarts={conf.restarts}: must not be below zero")
    if conf.store_seconds <= conf.dead_seconds:
        raise ConfigError(
            f"--rdzv-conf store_seconds={conf.store_seconds:g}: must be above interval x misses ({conf.dead_seconds:g})"
        )
    return conf
