"""Settings: from what the user gave to what was decided."""
