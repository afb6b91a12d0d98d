"""The rows of the supported models, a file for each line of models of a publisher."""
