"""ServerSettings from Python: a value that a flag would refuse is refused by that flag's name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from freight.errors import ConfigError
from freight.serve.settings import ServerSettings


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("port", 65536, "--port is 65536; it must be 0 to 65535"),
        ("port", -1, "--port is -1"),
        ("max_queue", -1, "--max-queue is -1; it must be 0 or more"),
        ("max_connections", 0, "--max-connections is 0; it must be 1 or more"),
        ("drain_timeout", math.nan, "--drain-timeout is nan; it must be 0 or more"),
        ("request_timeout", 0.0, r"--request-timeout is 0\.0; it must be more than 0 seconds"),
        ("write_timeout", -1.0, r"--write-timeout is -1\.0"),
        ("template_timeout", math.nan, "--template-timeout is nan"),
        ("unknown_fields", "warn", "--unknown-fields is 'warn'; it must be refuse or ignore"),
        ("log_format", "xml", "--log-format is 'xml'; it must be text or json"),
    ],
)
def test_a_value_out_of_bounds_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerSettings(**{field: value})
