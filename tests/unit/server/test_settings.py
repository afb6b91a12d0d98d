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
        ("port", 65536, "--port is 65536.* 0 to 65535"),
        ("port", -1, "--port is -1"),
        ("max_queue", -1, "--max-queue is -1.* 0 or more"),
        ("max_connections", 0, "--max-connections is 0.* 1 or more"),
        ("drain_timeout", math.nan, "--drain-timeout is nan.* 0 or more"),
        ("request_timeout", 0.0, r"--request-timeout is 0\.0.*more than 0"),
        ("write_timeout", -1.0, r"--write-timeout is -1\.0"),
        ("template_timeout", math.nan, "--template-timeout is nan"),
        ("unknown_fields", "warn", "--unknown-fields is 'warn'.* refuse or ignore"),
        ("log_format", "xml", "--log-format is 'xml'.* text or json"),
    ],
)
def test_a_value_out_of_bounds_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerSettings(**{field: value})
