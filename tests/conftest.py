"""For all tests: Freight is imported before torch, so that its defaults for threads hold here as they do for users."""

import freight  # noqa: F401
