"""The color of each batch size, the same in the figures, on the page and in MLflow."""

from collections.abc import Iterable

# Evenly spaced in hue; each has a contrast of at least 3 with white and with a dark page.
STOPS = ("#3b74d8", "#1c8fb5", "#1a9468", "#7b8c17", "#c07a00", "#d5502f", "#b8458f")


def batch_colors(batch_sizes: Iterable[int]) -> dict[int, str]:
    """Return a color (#rrggbb) for each batch size, blue for the smallest to purple."""
    sizes = sorted(set(batch_sizes))
    stops = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in STOPS]
    colors = {}
    for index, size in enumerate(sizes):
        position = index * (len(stops) - 1) / max(1, len(sizes) - 1)
        start = min(int(position), len(stops) - 2)
        pairs = zip(stops[start], stops[start + 1], strict=True)
        mixed = (round(low + (high - low) * (position - start)) for low, high in pairs)
        colors[size] = "#" + "".join(f"{part:02x}" for part in mixed)
    return colors
