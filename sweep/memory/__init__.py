"""Peak memory of training steps: predicted without the device, measured, and used to choose."""
