"""One module per command, each with ``run(args) -> exit code``; imported by :mod:`selfgc_rl.cli` when it runs."""
