"""``python -m bench``: the same as ``python -m bench.run``."""

from bench.run import main

raise SystemExit(main())
