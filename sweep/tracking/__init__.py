"""MLflow as a mirror of the trial folders: written, read back, and never needed for training."""
