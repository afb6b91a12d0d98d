"""Every checkpoint format, read and written."""
