"""From a job to extents."""
