"""The decision about batch sizes, and which trainings come next."""
