"""Monitoring for operators: metrics, the log, and the live view."""
