"""The command `freight`, a file for each verb."""
