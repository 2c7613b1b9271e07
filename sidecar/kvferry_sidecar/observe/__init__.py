"""Read-only views for operators: logs and status."""
