"""The stages of the pipeline: probes, jobs, loads, saves, copies."""
