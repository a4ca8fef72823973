"""Models, their losses, and sampling from them."""
