"""What shows or records how a run goes: the terminal, and the tools of ``[track]``."""
