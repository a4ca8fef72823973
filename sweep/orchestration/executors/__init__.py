"""Executors: where attempts run. One file each; `build.py` lists them."""
