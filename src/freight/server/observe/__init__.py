"""What operators see: metrics, the log, and the live view."""
