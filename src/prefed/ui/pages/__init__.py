"""The results of finished runs: tables for the terminal, plots, and an HTML page that explains itself."""
