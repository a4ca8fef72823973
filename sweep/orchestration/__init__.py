"""Planning on this machine, and running the trials of a plan to their end."""
