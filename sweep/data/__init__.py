"""Data sets, their tokens, and the order in which training reads them."""
