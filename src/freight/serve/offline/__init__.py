"""Requests from files: `freight batch` answers them, `freight verify` checks answers."""
