"""Settings of experiments and trials, and how people write numbers."""
