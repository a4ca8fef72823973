"""Memory: forecast without the device, measured in fresh processes, and the largest that fits."""
