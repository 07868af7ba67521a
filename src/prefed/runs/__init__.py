"""Start, resume, read, evaluate and export runs."""
