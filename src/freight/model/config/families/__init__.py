"""The rows of the supported models, with a file for each publisher's line of models."""
