"""Progress of runs: the terminal, ``run.log`` and the tools of ``[track]``."""
