"""What a model is, from its config.json: keys read, refused or named; families as data."""
