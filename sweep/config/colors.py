"""The color of each batch size, the same in the figures, on the page and in MLflow."""

from collections.abc import Iterable

# Evenly spaced in hue; each has a contrast of at least 3 with white and with a dark page.
STOPS = ("#3b74d8", "#1c8fb5", "#1a9468", "#7b8c17", "#c07a00", "#d5502f", "#b8458f")


def batch_colors(batch_sizes: Iterable[int]) -> dict[int, str]:
    """Return a color (#rrggbb) for each batch size, blue for the smallest to purple."""
    import numpy as np

    sizes = sorted(set(batch_sizes))
    stops = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in STOPS])
    position, ends = np.linspace(0, len(stops) - 1, len(sizes)), np.arange(len(stops))
    mixed = np.array([np.interp(position, ends, part).round() for part in stops.T], int).T.tolist()
    return {n: f"#{r:02x}{g:02x}{b:02x}" for n, (r, g, b) in zip(sizes, mixed, strict=True)}
