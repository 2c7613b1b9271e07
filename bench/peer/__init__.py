"""kvferry and LMCache's multiprocess mode side by side: ``make bench-peer``."""
