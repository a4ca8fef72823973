"""Which final points no other final point beats in both loss and time."""

from collections.abc import Sequence


def is_on_front(losses: Sequence[float], seconds: Sequence[float]) -> list[bool]:
    """Mark the points to which no other is at least equal in both and better in one.

    Only final points may be compared: under a schedule that knows its end, a point of a longer
    trial is not what a shorter one would have reached. Points with NaN are never on the front.
    """
    points = list(zip(losses, seconds, strict=True))
    return [
        loss == loss
        and time == time
        and not any(
            other <= loss and faster <= time and (other < loss or faster < time)
            for other, faster in points
        )
        for loss, time in points
    ]
