"""The wire contract of kvferry: a leaf package that the sidecar imports from here."""
